"""A loaded model, its texts, and one request as a value that is asked for its next step.

`model.py` holds what is loaded, `text.py` one sequence with what belongs to it, `task.py` one request on a text: the
steps of its prompt, then its tokens. `Llama.generate` and the scheduler are two loops over `Task.steps`. `saving.py`
keeps texts as values and files, `samplers.py` makes chains of samplers, `pool_drafter.py` drafts with the pool.

The room may use `sequence/`, `speculation/`, `store/` and everything below. Only `model.py` reads private fields of
llama_cpp.Llama; upstream's class is otherwise `llama/`'s. It knows no queue, no client and no other text's request.
"""
