"""The drop-in for llama_cpp.Llama.

`llama.py` has the class, with upstream's names, on a `Text` of `runtime/`; `stock.py` has what upstream does itself.
`opening.py` opens the pool and its texts, `fitting.py` decides before a model is loaded what goes where.

The room may use everything below; only `batching/`, `server/` and `cli/` may use it. `context.py` is the seam to
llama-cpp-python. What can be said without a `Llama` belongs to `sequence/` or lower.
"""
