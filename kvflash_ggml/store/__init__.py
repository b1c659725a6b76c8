"""Texts that are not in the pool, in memory and in folders: swapped-out conversations, and prefixes of prompts.

`texts.py` finds a text by its beginning. `swapped.py` holds conversations, `prefixes.py` and `disk.py` prefixes that
processes share in a folder. Conversations that servers share are in a distribution of its own, `fleet/`.

Files are renamed into place as a whole; a damaged file is deleted, and the text is read again. Folders may be full,
slow or gone: an answer never waits for a store longer than its limit. The room knows no `Llama` and no request.
"""
