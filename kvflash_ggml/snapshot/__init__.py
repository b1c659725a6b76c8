"""What a session must save, and in which bytes.

`SessionState` (`state/`) is the value, `format.py` its sections, `container.py` the file with sizes and checksums,
`fingerprint.py` the facts that must be equal for saved KV bytes to mean the same. docs/snapshot-format.md describes
each byte.

Files are hostile until proven sound: every number is checked before it is used, and a refused file changes nothing.
The room knows no `Llama` and writes files as a whole or not at all.
"""
