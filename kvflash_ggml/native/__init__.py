"""The native seam: the library, the cffi module compiled against it, the engine on top."""
