"""`kvflash-run launch PROGRAM`: starts a coding agent on a server by its environment, options, and files of its own."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import click

from ..constants import POOL_STEP, round_up
from .sections import HELP
from .terminal import note, unwinding

_SECONDS = 10
"""To wait for a server that should be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server. model: what it calls its model. n_ctx: tokens that a prompt and its answer may have."""

    url: str
    key: str
    model: str
    n_ctx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What points a program to a server: its variables, and its arguments before those of the user.

    files: JSON, by paths in a folder that is there while the program runs; FOLDER stands for it in the others.
    """

    environment: dict[str, str]
    arguments: list[str] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)


FOLDER = "FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """file: its name on the PATH. install: the command that installs it. tells: how it is pointed to a server."""

    file: str
    install: str
    tells: Callable[[Served], Told]


def _claude(served: Served) -> Told:
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")))
    environment = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        **dict.fromkeys((*names, "CLAUDE_CODE_SUBAGENT_MODEL"), served.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.n_ctx),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "ENABLE_TOOL_SEARCH": "false",  # a tool that comes later changes the front
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Told(environment=environment)


def _codex(served: Served) -> Told:
    settings = {
        "model": served.model,
        "model_provider": "kvflash",
        "model_context_window": served.n_ctx,
        "model_providers.kvflash.name": "kvflash",
        "model_providers.kvflash.base_url": f"{served.url}/v1",
        "model_providers.kvflash.env_key": "KVFLASH_API_KEY",
        "model_providers.kvflash.wire_api": "responses",
        "model_providers.kvflash.stream_idle_timeout_ms": 3_600_000,
    }
    # a JSON text or number is one of TOML
    arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Told(environment={"KVFLASH_API_KEY": served.key}, arguments=arguments)


def _opencode(served: Served) -> Told:
    model = {"name": served.model, "limit": {"context": served.n_ctx, "output": min(served.n_ctx // 4, 32_000)}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvflash",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
        "models": {served.model: model},
    }
    name = f"kvflash/{served.model}"
    config = {"provider": {"kvflash": provider}, "model": name, "small_model": name}
    return Told(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen_code(served: Served) -> Told:
    environment = {
        "OPENAI_BASE_URL": f"{served.url}/v1",
        "OPENAI_API_KEY": served.key,
        "OPENAI_MODEL": served.model,
    }
    return Told(environment=environment, arguments=["--auth-type", "openai"])


def _aider(served: Served) -> Told:
    environment = {"OPENAI_API_BASE": f"{served.url}/v1", "OPENAI_API_KEY": served.key}
    return Told(environment=environment, arguments=["--model", f"openai/{served.model}", "--no-show-model-warnings"])


def _goose(served: Served) -> Told:
    environment = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": served.model,
        "GOOSE_CONTEXT_LIMIT": str(served.n_ctx),
        "OPENAI_HOST": served.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": served.key,
    }
    return Told(environment=environment)


def _crush(served: Served) -> Told:
    """Its data folder has what its configuration does not set, such as the model that was chosen last."""
    model = {
        "id": served.model, "name": served.model, "context_window": served.n_ctx,
        "default_max_tokens": min(served.n_ctx // 4, 32_000),
    }  # fmt: skip
    provider = {
        "name": "kvflash", "type": "openai-compat", "base_url": f"{served.url}/v1", "api_key": "$KVFLASH_API_KEY",
        "models": [model],
    }  # fmt: skip
    chosen = {"provider": "kvflash", "model": served.model}
    config = {"providers": {"kvflash": provider}, "models": {"large": chosen, "small": chosen}}
    environment = {"KVFLASH_API_KEY": served.key, "CRUSH_GLOBAL_DATA": FOLDER}
    return Told(environment=environment, files={"crush.json": config})


def _cline(served: Served) -> Told:
    settings = {
        "provider": "openai-compatible", "baseUrl": f"{served.url}/v1", "model": served.model,
        "contextWindow": served.n_ctx, "timeout": 3_600_000,
    }  # fmt: skip
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    config = {"version": 1, "lastUsedProvider": settings["provider"], "providers": {settings["provider"]: entry}}
    return Told(
        environment={"OPENAI_API_KEY": served.key},
        arguments=["--data-dir", FOLDER],
        files={"settings/providers.json": config},
    )


PROGRAMS: Mapping[str, Program] = {
    "claude": Program(file="claude", install="npm install -g @anthropic-ai/claude-code", tells=_claude),
    "codex": Program(file="codex", install="npm install -g @openai/codex", tells=_codex),
    "opencode": Program(file="opencode", install="npm install -g opencode-ai", tells=_opencode),
    "qwen-code": Program(file="qwen", install="npm install -g @qwen-code/qwen-code", tells=_qwen_code),
    "aider": Program(file="aider", install="pip install aider-chat", tells=_aider),
    "goose": Program(file="goose", install="see its documentation", tells=_goose),
    "crush": Program(file="crush", install="npm install -g @charmland/crush", tells=_crush),
    "cline": Program(file="cline", install="npm install -g cline", tells=_cline),
}


@click.command(context_settings=HELP | {"auto_envvar_prefix": "KVFLASH", "ignore_unknown_options": True})
@click.option("--url", metavar="URL", help="A server that runs already.  [default: http://127.0.0.1:PORT]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Of the server on this machine: of one that runs (8080 unless given), or of one that -m starts (a free one).",
)
@click.option("--api-key", metavar="KEY", default="none", help="Of the server, if it needs one.")
@click.option(
    "-m",
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Serve this model while the program runs, instead. Options of the server are taken from their variables.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print what would be started, and start nothing. PORT stands for a free port."
)
@click.argument("program", type=click.Choice(list(PROGRAMS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")
@click.pass_context
def launch(
    ctx: click.Context,
    *,
    url: str | None,
    port: int | None,
    api_key: str,
    model: Path | None,
    dry_run: bool,
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Start a coding agent on a server of this package, and change no file. What follows -- goes to the program.

    \b
    kvflash-run launch claude                                  on the server at port 8080
    kvflash-run launch codex -m model.gguf -- exec "Fix it"    on a server of its own
    kvflash-run launch opencode --dry-run                      what to set
    """
    typed = [name for name in ("url", "port", "model") if _is_typed(ctx, name)]
    if typed[:1] == ["url"] and len(typed) > 1:
        raise click.UsageError(f"--url {url} names the server: leave out --{typed[1]}")
    if "port" in typed:  # a variable gives way to the command line
        url = None
    elif "url" in typed:
        model = None
    wanted = PROGRAMS[program]
    found = shutil.which(wanted.file)  # first: to load a model may take minutes
    if found is None and not dry_run:
        raise click.UsageError(f"there is no program {wanted.file!r} on the PATH: {wanted.install}")
    with _served(url, port, api_key, model, dry_run=dry_run) as served:
        told = wanted.tells(served)
        line = [*told.arguments, *arguments]
        for name, value in told.environment.items():
            shown = value if api_key == "none" else value.replace(json.dumps(api_key)[1:-1], "...")
            note(f"{name}={shlex.quote(shown)}")
        for path, value in told.files.items():
            note(f"{FOLDER}/{path}: {json.dumps(value)}")
        note(shlex.join([wanted.file, *line]))
        if found is None:
            note(f"there is no program {wanted.file!r} on the PATH: {wanted.install}")
        if found is None or dry_run:
            return
        with _folder(told.files) as folder:
            environment = {name: folder if value == FOLDER else value for name, value in told.environment.items()}
            line[: len(told.arguments)] = [folder if word == FOLDER else word for word in told.arguments]
            code = _run([found, *line], {**os.environ, **environment})
    sys.exit(code)


@contextmanager
def _folder(files: Mapping[str, Any]) -> Iterator[str]:
    """Yield a folder with these files, JSON by their paths in it. It is removed at the end."""
    with TemporaryDirectory(prefix="kvflash-") as folder:
        for path, value in files.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(value), encoding="utf-8")
        yield folder


def _is_typed(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


@contextmanager
def _served(url: str | None, port: int | None, key: str, model: Path | None, *, dry_run: bool) -> Iterator[Served]:
    """Yield the server that is there, or one of the model's own, which ends with the program."""
    if model is None:
        yield _asked((url or f"http://127.0.0.1:{port or 8080}").rstrip("/").removesuffix("/v1"), key)
    elif dry_run:
        note(shlex.join(["kvflash-run", *_line(model, port)]))
        yield _planned(model, port, key)
    else:
        with _server(model, key, port) as address:
            yield _asked(address, key)


def _line(model: Path, port: int | None) -> list[str]:
    return ["serve", str(model), "--host", "127.0.0.1", "-q", "--port", str(port or 0)]


def _planned(model: Path, port: int | None, key: str) -> Served:
    """Tell what `_server` would serve, by the model's file and the variables of the options. It loads nothing."""
    from .rope import lengths
    from .serve import serve

    verb, *line = _line(model, port)
    asked = serve.make_context(verb, line).params
    alias, *_ = asked["alias"] or (model.stem,)
    n_ctx = round_up(asked["ctx_size"] or lengths(str(model))[1], POOL_STEP)
    if not n_ctx:
        raise click.ClickException(
            f"{model} does not say for how long a context it was trained: set KVFLASH_CTX_SIZE, or see what "
            f"kvflash-run doctor {model} says of the file"
        )
    return Served(url=f"http://127.0.0.1:{port or 'PORT'}", key=key, model=alias, n_ctx=n_ctx)


@contextmanager
def _server(model: Path, key: str, port: int | None) -> Iterator[str]:
    """Start a server that ends with the program, and yield its address. ClickException if it does not come up."""
    line = [sys.executable, "-m", "kvflash_ggml", *_line(model, port)]
    keys = {} if key == "none" else {"KVFLASH_API_KEY": key}
    # in a session of its own, so that Ctrl-C reaches the program alone
    process = subprocess.Popen(
        line, stderr=subprocess.PIPE, text=True, env={**os.environ, **keys}, start_new_session=True
    )
    assert process.stderr is not None
    with unwinding():  # the server, and all its memory, would be left behind
        try:
            for said in process.stderr:
                if found := re.search(r"serving .* at (http://\S+)", said):
                    threading.Thread(target=_drop, args=(process.stderr,), daemon=True).start()
                    yield found[1]
                    return
                note(said.rstrip("\n"))
            raise click.ClickException(f"the server has ended with {process.wait()}")
        finally:
            process.terminate()
            process.wait()


def _drop(lines: TextIO) -> None:
    """Read to the end: a pipe that nobody reads would stop the server in time."""
    with lines:
        deque(lines, 0)


def _asked(url: str, key: str) -> Served:
    """Ask what is served at an address. ClickException if nothing is."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            entries = json.load(reply)["data"]
            # of several models the loaded one, else the first: with the context it will have, or was trained for
            entry = next((one for one in entries if _is_loaded(one)), entries[0])
            meta = entry["meta"]
            return Served(url=url, key=key, model=entry["id"], n_ctx=meta.get("n_ctx") or meta["n_ctx_train"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as err:
        if isinstance(err, urllib.error.HTTPError):
            err.close()
        raise click.ClickException(
            f"no server of kvflash_ggml answers at {url} ({err}): start one with kvflash-run serve MODEL, name it with "
            f"--url, its key with --api-key, or give --model"
        ) from err


def _is_loaded(entry: dict[str, Any]) -> bool:
    return "n_ctx" in entry["meta"] and entry.get("status", {}).get("value", "loaded") == "loaded"


def _run(line: list[str], environment: dict[str, str]) -> int:
    """Run the program. Return its exit code as a shell has it. Ctrl-C is the program's: it may mean something else
    there.
    """
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        code = subprocess.run(line, env=environment, check=False).returncode
        return 128 - code if code < 0 else code
    finally:
        signal.signal(signal.SIGINT, before)
