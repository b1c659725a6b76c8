"""Lets a program that imports llama_cpp alone find the library of kvflash_ggml. Python runs this at its start.

llama-cpp-python is installed without a library of its own, so somebody must tell it where one is. Nothing but this
file is loaded before llama_cpp is imported, and a llama_cpp that has a library, or was told of one, is left alone.

The commands begin here too: nothing of theirs is imported before Ctrl-C ends the process without a traceback.
"""

import sys


class BeforeLlamaCpp:
    """Stands in front of the import system until llama_cpp is imported for the first time."""

    def find_spec(self, name, path=None, target=None):
        if name != "llama_cpp":
            return None
        sys.meta_path.remove(self)
        import importlib.util
        import os
        from pathlib import Path

        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            return spec
        if not Path(spec.origin).with_name("lib").is_dir() and "LLAMA_CPP_LIB_PATH" not in os.environ:
            import kvflash_ggml  # noqa: F401  it tells llama_cpp where the library is
        if "KVFLASH_INSTALL" in os.environ:
            from kvflash_ggml.llama.import_hook import replaced

            spec = replaced(spec)
        return spec


sys.meta_path.insert(0, BeforeLlamaCpp())


def _quietly(module, name):
    """Import a command; meanwhile Ctrl-C ends the process at once, unless it is ignored, as below nohup."""
    import importlib
    import signal

    asked = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if asked:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = getattr(importlib.import_module(module), name)
    if asked:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command


def run():
    """kvflash-run."""
    return _quietly("kvflash_ggml.cli", "main")()


def convert():
    """kvflash-convert."""
    return _quietly("kvflash_ggml.cli.convert", "convert")()
