"""OpenAI's API, and a page, on a scheduler. It needs the extra `server`.

A request passes `guard.py` (keys, hosts), `intake.py` (the body, within limits), `schema.py`, `front.py` (template,
tokens, grammar) and `exchange.py`, which submits it and writes the answer. `anthropic.py`, `responses.py` and
`ollama.py` translate their interfaces to a chat and back.

The room talks to the engine's thread through `batching/` alone. Requests are hostile: each size, depth and duration
has a bound, and an error is answered in the shape of its interface. Work that takes long leaves the event loop.
"""
