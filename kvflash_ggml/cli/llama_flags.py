"""Options of llama-server and llama-cli without an equal here: each has no effect, or is refused with a remedy.

Options that do the same here have the same names, and are not in this list.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from .sections import ON_OFF

F = TypeVar("F", bound=Callable[..., Any])

TAKEN = (
    "--jinja", "--metrics", "--slots", "-cb", "--cont-batching", "-kvu", "--kv-unified", "--kv-unified-per-slot",
    "--swa-full", "--cache-prompt", "--no-context-shift", "--no-warmup", "--no-display-prompt", "--show-timings",
    "-kvo", "--kv-offload", "--perf", "--no-perf", "-e", "--escape", "--cache-idle-slots", "--mmproj-auto",
    "--no-mmproj", "--no-mmproj-auto", "--prefill-assistant", "--no-skip-chat-parsing", "--models-autoload",
    "--no-ui-mcp-proxy", "--no-webui-mcp-proxy", "-no-ag", "--no-agent", "--no-log-jsonl", "--log-prefix",
    "--log-timestamps", "--no-cors-credentials",
)  # fmt: skip
"""They ask for what is so anyway."""

SWITCHED = ("--color", "-co")
"""The same, with llama.cpp's value or without one."""

_REQUEST = "each request to kvflash-run serve says it, with the field"
_PROXY = "put a proxy before the server (nginx, Caddy)"
_NONE = "there is no such setting: leave it out"
_CORES = "run it under taskset, chrt or nice"
_DRAFTER = "a drafter shares the setting of the model: leave it out"
_IMAGES = "--mmproj FILE is all that is said of images and sound, see docs/images.md: leave it out"
_PRESET = "-hf OWNER/REPO[:QUANT] fetches a model: write the name of the one you want"
_TOOLS = "the program that asks runs tools, as an agent does: this server never does"

ANSWERED: dict[tuple[str, ...], str] = {
    ("-np", "--parallel", "--host", "--port", "--api-key", "--api-prefix", "--ssl-key-file", "--ssl-cert-file"): (
        "it is for a server: kvflash-run serve MODEL"
    ),
    ("-p", "--prompt", "-f", "--file", "-bf", "--binary-file", "--image", "--audio"): (
        "it is for one answer: kvflash-run MODEL -p PROMPT"
    ),
    ("--chat-template-file",): "it is for a server: kvflash-run serve MODEL",
    ("--server-base",): "it asks no server: kvflash-run launch starts agents on one",
    ("--system-prompt",): "-sys TEXT is the system message",
    ("-sysf", "--system-prompt-file"): '--system "$(cat FILE)" takes the text of a file',
    ("-st", "--single-turn", "-i", "--interactive", "-if", "--interactive-first"): (
        "a prompt gets one answer, -cnv with it stays in the chat, and without a prompt a chat begins: leave it out"
    ),
    ("-mli", "--multiline-input"): 'in a chat """ begins and ends a message of several lines: leave it out',
    ("--simple-io",): "where input or output is no terminal, or TERM is dumb, it is so anyway: leave it out",
    ("--verbose-prompt", "--display-prompt"): "the prompt is not written out: leave it out",
    ("--no-show-timings",): "-q leaves out the line with the timings",
    ("--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro"): "--snapshot FILE keeps what was read",
    ("--no-jinja",): "chats use the model's Jinja template; /completion and -no-cnv use none",
    ("--no-slots",): "/slots shows no text: give an --api-key, and only its holders see the counters",
    ("--no-cache-prompt",): f"{_REQUEST} cache_prompt",
    ("--cache-reuse",): "texts share their beginnings only: leave it out",
    ("-cram", "--cache-ram"): "--park-memory SIZE says how much host memory conversations may take, as 8G",
    ("-cl", "--cache-list"): "kvflash-run list shows the models that were fetched",
    ("-sps", "--slot-prompt-similarity"): "a request continues the text that saves most of its prompt: leave it out",
    ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", "-cms", "--checkpoint-min-step"): (
        "the server chooses its checkpoints: leave it out"
    ),
    ("--no-cache-idle-slots", "-no-kvu", "--no-kv-unified"): (
        "conversations share one pool, and are kept in host memory: --park-memory bounds it"
    ),
    ("--context-shift",): "--overflow roll leaves out the oldest messages of a chat; -c 0 is all of the trained length",
    ("-nkvo", "--no-kv-offload"): "the pool is what stays on the device: make it smaller with --kvflash TOKENS",
    ("-nocb", "--no-cont-batching"): "give --parallel 1: then one answer is computed at a time",
    ("--keep",): "--kvflash-pin 0:N keeps the first N tokens on the device",
    ("--embedding", "--embeddings", "--pooling"): "a server embeds texts: kvflash-run serve MODEL --embeddings",
    ("--embd-normalize",): "an embedding has the length 1: leave it out",
    ("--rerank", "--reranking"): "a server ranks texts: kvflash-run serve MODEL --reranking",
    ("-mmu", "--mmproj-url"): "--mmproj FILE names a file that is there: kvflash-run pull OWNER/REPO:FILE.gguf gets it",
    ("--mmproj-offload", "--no-mmproj-offload", "-mmdev", "--mmproj-device", "--image-min-tokens"): _IMAGES,
    ("--image-max-tokens", "--mtmd-batch-max-tokens", "--media-path"): _IMAGES,
    ("--video", "--video-fps", "--video-timestamp-interval", "--video-ffmpeg-dir"): _IMAGES,
    ("-mu", "--model-url"): "files of a URL are not fetched: -hf OWNER/REPO fetches one of a hub",
    ("-dr", "--docker-repo"): "-hf OWNER/REPO fetches a model of a hub",
    ("-hff", "--hf-file"): "-hf OWNER/REPO:FILE.gguf names the file",
    ("-hft", "--hf-token"): "set HF_TOKEN, which other users of the machine do not see",
    ("-hfd", "--hf-repo-draft", "-hfrd", "--spec-draft-hf"): (
        "kvflash-run pull OWNER/REPO:FILE.gguf prints the path for -md"
    ),
    ("--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default", "--fim-qwen-7b-default"): _PRESET,
    ("--fim-qwen-7b-spec", "--fim-qwen-14b-spec", "--fim-qwen-30b-default", "--gpt-oss-20b-default"): _PRESET,
    ("--gpt-oss-120b-default", "--vision-gemma-4b-default", "--vision-gemma-12b-default"): _PRESET,
    ("--offline",): "set HF_HUB_OFFLINE=1",
    ("--models-preset",): "the options hold for every model: --models-dir DIR names a folder of them",
    ("--no-models-autoload",): "with --models-dir the model that a request names is loaded: leave it out",
    ("--tags",): "a model has a name only, -a: leave it out",
    ("--models-dir", "--models-max", "--sleep-idle-seconds"): "it is for a server: kvflash-run serve --models-dir DIR",
    ("--chat-template",): "the names of templates are llama.cpp's own: put the template into a file, and give "
    "--chat-template-file FILE to serve",
    ("--chat-template-kwargs", "-rea", "--reasoning"): (
        f'{_REQUEST} chat_template_kwargs, as {{"enable_thinking": false}}'
    ),
    ("--reasoning-effort",): f"{_REQUEST} reasoning_effort",
    ("--reasoning-budget", "--reasoning-budget-message"): "max_tokens of a request bounds thoughts and answer",
    ("--reasoning-preserve", "--no-reasoning-preserve"): "the model's template says which thoughts stay: leave it out",
    ("--reasoning-format",): f"{_REQUEST} reasoning_format",
    ("--skip-chat-parsing",): "/completion gives the text as the model writes it",
    ("--no-prefill-assistant",): "end the conversation with a message of the user",
    ("--grammar", "--grammar-file"): f"{_REQUEST} grammar",
    ("-j", "--json-schema", "-jf", "--json-schema-file"): f"{_REQUEST} json_schema",
    ("-s", "--seed"): f"{_REQUEST} seed",
    ("-l", "--logit-bias"): f"{_REQUEST} logit_bias",
    ("-r", "--reverse-prompt"): f"{_REQUEST} stop",
    ("--ignore-eos",): f"{_REQUEST} ignore_eos; --min-tokens N holds for all",
    ("-sp", "--special"): "special tokens are no text: /completion with return_tokens gives their numbers",
    ("--no-escape",): "requests are JSON, with its escapes: leave it out",
    ("-bs", "--backend-sampling"): "tokens are sampled on the host: leave it out",
    ("--spm-infill",): "/infill puts the prefix first, as its models are trained: leave it out",
    ("--warmup",): "the first request warms up: leave it out",
    ("--numa",): "run it under numactl",
    ("-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict", "--prio", "-Cb", "--cpu-mask-batch"): _CORES,
    ("-Crb", "--cpu-range-batch", "--cpu-strict-batch", "--prio-batch"): _CORES,
    ("--poll", "--poll-batch"): "OMP_WAIT_POLICY (active or passive) or GOMP_SPINCOUNT says it, between steps",
    ("--no-host", "--no-op-offload", "--op-offload"): "llama.cpp's default is used: leave it out",
    ("-dt", "--defrag-thold"): "a pool has no holes to close: leave it out",
    ("-lm", "--load-mode"): "--mmap, --no-mmap and --mlock say how the file is loaded",
    ("-lzm", "--lazy-mode"): "--mmap reads what is used when it is used: leave it out",
    ("-ncffn", "--n-cpu-ffn"): r"-ot 'blk\.[0-9]\.ffn_=CPU' keeps those of the first ten layers in host memory",
    ("--check-tensors",): "values are not looked at: leave it out",
    ("--control-vector", "--control-vector-scaled", "--control-vector-layer-range"): (
        "control vectors are not applied: --lora adds an adapter"
    ),
    ("--lora-init-without-apply",): "an adapter holds for the whole process: start a server with it, and one without",
    ("--cors-methods", "--cors-headers", "--cors-credentials"): "--cors-origins is enough: leave it out",
    ("--reuse-port",): f"two servers cannot share an address: {_PROXY}",
    ("--path", "--ui-config", "--webui-config", "--ui-config-file", "--webui-config-file"): (
        f"the page is as it is; --no-page leaves it out, and for files of your own {_PROXY}"
    ),
    ("--ui-mcp-proxy", "--webui-mcp-proxy", "--tools", "--tools-runtime"): _TOOLS,
    ("--mcp-servers-config", "--mcp-servers-json", "-ag", "--agent"): _TOOLS,
    ("--sse-ping-interval",): "a stream says something every 15 s: leave it out",
    ("--props",): "/props only tells: settings are those of the command line",
    ("--threads-http",): "the server needs no setting for it: leave it out",
    ("--log-disable", "-lv", "--log-verbosity", "--verbosity", "--log-verbose"): "-q or -v say how much is logged",
    ("--log-jsonl", "--log-colors", "--no-log-prefix", "--no-log-timestamps"): (
        "a line of JSON for each request is on stderr: leave it out"
    ),
    ("--log-prompts-dir",): "no text is logged: /kvflash/conversations shows the conversations",
    ("-lcs", "--lookup-cache-static", "-lcd", "--lookup-cache-dynamic"): "--kvflash-spec ngram needs no file",
    ("--spec-default",): "--kvflash-spec auto chooses what fits the model",
    ("--spec-draft-n-min", "--spec-draft-p-split", "--draft-p-split", "--spec-draft-p-min", "--draft-p-min"): (
        "the number of drafts follows from what they cost and win: --spec-draft-n-max bounds it"
    ),
    ("--draft-min", "--draft-n-min"): "--spec-draft-n-max bounds the number of drafts",
    ("--spec-synth-len", "--spec-synth-rates"): "kvflash-bench spec measures drafts of a chosen quality",
    ("--spec-draft-backend-sampling", "--no-spec-draft-backend-sampling"): _DRAFTER,
    ("--spec-draft-threads", "-td", "--threads-draft", "--spec-draft-threads-batch"): _DRAFTER,
    ("-tbd", "--threads-batch-draft", "--spec-draft-cpu-mask", "-Cd", "--cpu-mask-draft"): _DRAFTER,
    ("--spec-draft-cpu-range", "-Crd", "--cpu-range-draft", "--spec-draft-cpu-strict"): _DRAFTER,
    ("--cpu-strict-draft", "--spec-draft-prio", "--prio-draft", "--spec-draft-poll", "--poll-draft"): _DRAFTER,
    ("--spec-draft-cpu-mask-batch", "-Cbd", "--cpu-mask-batch-draft", "--spec-draft-cpu-strict-batch"): _DRAFTER,
    ("--cpu-strict-batch-draft", "--spec-draft-prio-batch", "--prio-batch-draft"): _DRAFTER,
    ("--spec-draft-poll-batch", "--poll-batch-draft", "--spec-draft-type-k", "-ctkd"): _DRAFTER,
    ("--cache-type-k-draft", "--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"): _DRAFTER,
    ("--spec-draft-override-tensor", "-otd", "--override-tensor-draft", "--spec-draft-cpu-moe", "-cmoed"): _DRAFTER,
    ("--cpu-moe-draft", "--spec-draft-n-cpu-moe", "--spec-draft-ncmoe", "-ncmoed", "--n-cpu-moe-draft"): _DRAFTER,
    ("--spec-draft-device", "-devd", "--device-draft"): _DRAFTER,
    ("--spec-ngram-mod-n-min", "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-match"): _NONE,
    ("--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m", "--spec-ngram-simple-min-hits"): _NONE,
    ("--spec-ngram-map-k-size-n", "--spec-ngram-map-k-size-m", "--spec-ngram-map-k-min-hits"): _NONE,
    ("--spec-ngram-map-k4v-size-n", "--spec-ngram-map-k4v-size-m", "--spec-ngram-map-k4v-min-hits"): _NONE,
    ("--spec-ngram-size-n", "--spec-ngram-size-m", "--spec-ngram-min-hits"): _NONE,
    ("-fitc", "--fit-ctx"): "the context is -c, and only the pool takes memory of the device: --kvflash bounds it",
    ("--usage",): "--help shows the common options, --help-all every one",
    ("--version",): "kvflash-run --version",
    ("--completion-bash",): "docs/options.md says how a shell completes verbs and options",
}
"""What to do instead."""


def llama_flags(function: F) -> F:
    """Add llama.cpp's flags to a command, hidden, less those that the decorators below have added."""
    own = {name for param in getattr(function, "__click_params__", ()) for name in param.opts}
    for name in TAKEN:
        function = _hidden(name, is_flag=True)(function)
    for name in SWITCHED:
        function = _hidden(name, is_flag=True, metavar=f"{ON_OFF}|auto")(function)
    for names, answer in ANSWERED.items():
        for name in (name for name in names if name not in own):
            # its value can be missing, so that the answer comes before that complaint
            given = {"is_flag": False, "flag_value": "", "default": None}
            function = _hidden(name, **given, is_eager=True, callback=_saying(name, answer))(function)
    return function


def _hidden(*names: str, **attributes: Any) -> Callable[[F], F]:
    """Make a hidden option, whose parameter has a name that no argument of ours has, as `path`."""
    own = "llama" + re.sub(r"\W", "_", names[0])
    return click.option(*names, own, hidden=True, expose_value=False, allow_from_autoenv=False, **attributes)


def _saying(name: str, answer: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def say(_ctx: click.Context, _param: click.Parameter, given: str | None) -> None:
        if given is not None:
            raise click.UsageError(f"{name} is llama.cpp's: {answer}")

    return say
