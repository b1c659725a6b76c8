"""`kvflash-run serve --models-dir`: serves a folder of models, of which as many are loaded as have room.

`serving.py` is what the command line calls, and a model's process. `router.py` has the routes, `engines.py` says
which models are loaded, `model_folder.py` the files, and `forward.py` hands a request to a model's process.
"""
