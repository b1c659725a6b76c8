"""Finds the heads of a model that retrieve facts, on documents whose answers are known.

`documents.py` writes prose with facts in it, `measure.py` reads it in a context of its own, `choice.py` chooses heads,
and `known.py` keeps them in a file that names their model. `finder.py` gives these heads to a sequence, and calibrates
behind the first answer where there is no file.

The room makes contexts on a loaded model and reads their keys and queries. It touches no pool and no text of a user.
"""
