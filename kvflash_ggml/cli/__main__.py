"""`python -m kvflash_ggml.cli`."""

from .main import main

main(prog_name="kvflash-run")
