"""Makes and changes files of drafters and models without the native library: kvflash-convert.

The room reads safetensors and GGUF files (`gguf/`), writes GGUF files, quantises, and runs llama.cpp's own converter.
Every number of a checkpoint is checked before it is used, and no value that belongs to the training is guessed. A file
is written beside its place and renamed, so that a failed conversion leaves nothing.
"""
