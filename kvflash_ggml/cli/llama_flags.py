"""Options of llama-server and llama-cli that mean nothing here, or something else: each is taken, or answered.

Options that do the same here have the same names, and are not in this list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

TAKEN = (
    "--jinja", "--metrics", "--slots", "-cb", "--cont-batching", "-kvu", "--kv-unified", "--swa-full", "--cache-prompt",
    "--no-context-shift", "--no-warmup", "--no-display-prompt", "--color", "-co",
)  # fmt: skip
"""They ask for what is so anyway."""

_PYTHON = "the command line does not have it: use kvflash_ggml.Llama in Python, with"
_REQUEST = "each request says it, with the field"
_PROXY = "put a proxy before the server (nginx, Caddy)"

ANSWERED: dict[tuple[str, ...], str] = {
    ("-np", "--parallel", "--host", "--port", "--api-key"): "it is for a server: kvflash-run serve MODEL",
    ("--no-jinja",): "chats use the model's Jinja template; /completion and -no-cnv use none",
    ("--no-slots",): "/slots shows no text: give an --api-key, and only its holders see the counters",
    ("--no-cache-prompt",): f"{_REQUEST} cache_prompt",
    ("--cache-reuse",): "texts share their beginnings only: leave it out",
    ("-cram", "--cache-ram"): "--park-memory SIZE says how much host memory conversations may take, as 8G",
    ("-sps", "--slot-prompt-similarity"): "a request continues the text that saves most of its prompt: leave it out",
    ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"): "the server chooses its checkpoints: leave it out",
    ("--context-shift",): "no text is cut: a pool needs no shift, and -c 0 is the length the model was trained for",
    ("-nkvo", "--no-kv-offload"): "the pool is what stays on the device: make it smaller with --kvflash TOKENS",
    ("-nocb", "--no-cont-batching"): "one answer is computed at a time unless --parallel says more: leave it out",
    ("--keep",): "--kvflash-pin 0:N keeps the first N tokens on the device",
    ("--embedding", "--embeddings", "--pooling"): "a server embeds texts: kvflash-run serve MODEL --embeddings",
    ("--rerank", "--reranking"): "a server ranks texts: kvflash-run serve MODEL --reranking",
    ("-mm", "--mmproj", "-mmu", "--mmproj-url", "--image"): "images are not read in a pool: use llama-server",
    ("-mu", "--model-url"): "files of a URL are not fetched: -hf OWNER/REPO fetches one of a hub",
    ("-hff", "--hf-file"): "-hf OWNER/REPO:FILE.gguf names the file",
    ("-hft", "--hf-token"): "set HF_TOKEN, which other users of the machine do not see",
    ("-hfd", "--hf-repo-draft"): "kvflash-run pull OWNER/REPO:FILE.gguf prints the path for -md",
    ("--offline",): "set HF_HUB_OFFLINE=1",
    ("--chat-template",): "the names of templates are llama.cpp's own: put the template into a file, and give "
    "--chat-template-file FILE to serve",
    ("--chat-template-kwargs", "--reasoning-budget"): f"{_REQUEST} chat_template_kwargs, "
    'as {"enable_thinking": false}',
    ("--reasoning-format",): "thoughts stay in the text as the model writes them: leave it out",
    ("--grammar", "--grammar-file"): f"{_REQUEST} grammar",
    ("-j", "--json-schema"): f"{_REQUEST} json_schema",
    ("--lora", "--lora-scaled"): f"{_PYTHON} lora_path and lora_scale",
    ("--rope-scaling", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx"): (
        f"{_PYTHON} rope_scaling_type, rope_freq_base, rope_freq_scale and yarn_orig_ctx"
    ),
    ("--override-kv",): f"{_PYTHON} kv_overrides",
    ("--numa",): "run it under numactl",
    ("--ssl-key-file", "--ssl-cert-file"): f"{_PROXY} that speaks TLS",
    ("--api-prefix", "--path"): f"{_PROXY} that rewrites paths or serves files",
    ("--threads-http",): "the server needs no setting for it: leave it out",
    ("--log-file", "--log-disable", "-lv", "--log-verbosity"): "-q or -v say how much is logged, and 2> FILE where",
}
"""What to do instead."""


def llama_flags(function: F) -> F:
    """A decorator that adds them to a command, hidden, less what the decorators below it have added."""
    own = {name for param in getattr(function, "__click_params__", ()) for name in param.opts}
    for name in TAKEN:
        function = _hidden(name, is_flag=True)(function)
    for names, answer in ANSWERED.items():
        for name in (name for name in names if name not in own):
            # a flag, so that the answer comes before the complaint that its value is missing
            function = _hidden(name, is_flag=True, is_eager=True, callback=_saying(name, answer))(function)
    return function


def _hidden(*names: str, **attributes: Any) -> Callable[[F], F]:
    """The parameter has a name that no argument of ours has, as `path`."""
    own = f"llama{names[0].replace('-', '_')}"
    return click.option(*names, own, hidden=True, expose_value=False, allow_from_autoenv=False, **attributes)


def _saying(name: str, answer: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def say(_ctx: click.Context, _param: click.Parameter, given: bool) -> None:
        if given:
            raise click.UsageError(f"{name} is llama.cpp's: {answer}")

    return say
