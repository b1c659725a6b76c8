"""The drop-in for llama_cpp.Llama.

`llama.py` has the class, with upstream's names, on a `Text` of `runtime/`; `stock.py` has what upstream does itself.
`opening.py` decides how a model is opened, with `fitting.py` where memory is to be planned, and `pooled.py` opens the
pool and its texts. `serving.py` is what a server asks of the class beside its public calls.

A start loads what a plain answer needs; what few use is imported in the function that needs it. A test counts lines
(`tests/native/test_start.py`).

The room may use everything below; only `batching/`, `server/` and `cli/` may use it. `context.py` is the seam to
llama-cpp-python. What can be said without a `Llama` belongs to `sequence/` or lower.
"""
