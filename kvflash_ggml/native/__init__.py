"""The native seam: the library, the cffi module compiled against it, the engine on top.

`kvf.h` is all that Python asks of C++, and `Engine` is its Python side: arrays in, arrays and tickets out. The C++
executes one plan for each step; it decides nothing, and knows no policy, no page table and no text.

`library.py` finds and proves the build at the first use, never at import. A call that fails raises a typed error and
has changed nothing.
"""
