"""What goes where: which weights on which device, how many slots, how large a step. Pure but for its measurements."""
