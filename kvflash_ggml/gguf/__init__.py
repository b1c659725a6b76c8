"""Reads heads of GGUF files: what a file is for, what a drafter needs, and which model it was trained for.

Every `Llama` asks this room before llama.cpp opens a file. Nothing here loads the native library or writes a file;
`convert/` writes.
"""
