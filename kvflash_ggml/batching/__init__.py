"""Many conversations on one model: who is next, whose text is at hand, and where the others are meanwhile.

One thread, `kvflash-engine`, owns the model. `Scheduler` is its loop: it takes requests from the queue, lets `Slot`
choose the text that saves most of a prompt, asks `schedule.py` who has the next step, and computes that. An `Answer`
makes text of the tokens. Other threads only put values (`messages.py`) into the queue and get events back.

The room may ask a model what `model.py` says and nothing else; only `llama.py` and `engine.py` know a `Llama`.
Texts are kept in `store/`. It knows no HTTP, no JSON and no chat template: these are of `server/` and `chat/`.
"""
