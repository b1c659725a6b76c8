"""What upstream's server makes of answers: requests as JSON on standard input, its messages on standard output."""

import json
import sys

import xllamacpp

asked = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path, params.chat_template, params.use_jinja = asked["model"], asked["template"], True
params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = 1 << 14, 1, 0, False
params.verbosity, params.cpuparams.n_threads, params.fit_params = 0, 1, False
server = xllamacpp.Server(params)
for request in asked["requests"]:
    try:
        told = server.handle_chat_completions({**request, "verbose": True})
        print(json.dumps([told["__verbose"]["content"], told["choices"][0]["message"]]))
    except Exception as err:  # an answer that it does not understand
        print(json.dumps([None, str(err)]))
