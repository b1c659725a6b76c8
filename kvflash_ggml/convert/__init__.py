"""Makes and changes files of drafters and models without the native library: kvflash-convert.

The room reads safetensors and GGUF files (`gguf/`), writes GGUF files, quantises, and runs llama.cpp's own converter.
"""
