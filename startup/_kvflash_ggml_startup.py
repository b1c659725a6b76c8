"""Lets a program that imports llama_cpp alone find the library of kvflash_ggml. Python runs this at its start.

llama-cpp-python is installed without a library of its own, so somebody must tell it where one is. Nothing but this
file is loaded before llama_cpp is imported, and a llama_cpp that has a library, or was told of one, is left alone.
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
