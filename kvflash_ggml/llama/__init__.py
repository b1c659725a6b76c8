"""The drop-in for llama_cpp.Llama."""
