"""Page images off the device: memory, spill files, and which chunk has which."""
