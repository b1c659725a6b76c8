"""`python -m kvflash_ggml`: the command line."""

from .cli import main

main(prog_name="kvflash-run")
