"""`kvflash-run serve --models-dir`: serves a folder of models, of which one is loaded at a time.

`serving.py` is what the command line calls, and a model's process. `router.py` has the routes, `engines.py` the turns
of the models, `model_folder.py` the files, and `forward.py` hands a request to a model's process.
"""
