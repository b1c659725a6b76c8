"""Media rows: what stands for an image in a text, and the embeddings that a model reads in its place.

A row of an image or a sound has a negative number in the text, computed from the bytes of the file, so that equal
files are equal prefixes. `rows.py` keeps the embeddings that belong to these numbers, `files.py` decodes files within
limits, `decoder.py` does so in a child process where a file could end ours.

Files are from strangers. The room knows neither the engine nor a text, only numbers and arrays.
"""
