"""GGUF files made and checked without the native library: drafters from safetensors, moved, quantised and verified."""
