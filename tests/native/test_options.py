"""Options that llama.cpp has too: every spelling is known, and what changes the model changes it as upstream does."""

from __future__ import annotations

import ast
import json
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import options_table
import pytest
from support.harness import MODELS, logits_along, same_bits, write_adapter
from vendoring import source
from vendoring.pin import VendorError

STOCK = {"flash_attn": True, "swa_full": False}


def test_every_option_of_the_pinned_server_is_known() -> None:
    try:
        declared = options_table.upstream(source.pristine_tree() / source.LLAMA / "common" / "arg.cpp")
    except VendorError as err:
        pytest.skip(f"no source of llama.cpp: {err}")
    assert len(declared) > 350
    assert sorted(declared - options_table.known()) == []


def test_every_setting_of_the_other_server_is_told() -> None:
    import llama_cpp

    tree = ast.parse((Path(llama_cpp.__file__).parent / "server" / "settings.py").read_text(encoding="utf-8"))
    fields = [line.target for one in tree.body if isinstance(one, ast.ClassDef) for line in one.body
              if isinstance(line, ast.AnnAssign)]  # fmt: skip
    names = {field.id for field in fields if isinstance(field, ast.Name)}
    assert len(names) > 50
    page = options_table.PAGE.read_text(encoding="utf-8").partition("## llama-cpp-python's server")[2]
    told = set(re.findall(r"`(?:--)?([a-z_0-9]+)`", page.partition("\n## ")[0]))
    assert sorted(names - told) == []


def test_an_adapter_in_a_pool_is_that_of_upstream(
    llama: Any, stock: Any, model: Any, tokens: Any, tmp_path: Path
) -> None:
    query = next(t for t in gguf.GGUFReader(model("dense")).tensors if t.name == "blk.0.attn_q.weight")
    width, out = map(int, query.shape)
    layers = llama().metadata["qwen3.block_count"]
    adapter = write_adapter(tmp_path / "lora.gguf", layers=int(layers), width=width, out=out)
    prompt, rest = tokens[:300], tokens[300:304]
    plain = logits_along(llama(kvflash=1024), prompt, rest)
    for scale in (1.0, 0.5):
        changed = {"lora_path": adapter, "lora_scale": scale}
        ours = logits_along(llama(kvflash=1024, **changed), prompt, rest)
        assert same_bits(ours, logits_along(stock(**changed, **STOCK), prompt, rest))
        assert not same_bits(ours, plain)
    small = llama(n_ctx=2048, kvflash=512, kvflash_reading="exact", n_batch=64, n_ubatch=64, **changed)
    whole = llama(n_ctx=2048, kvflash=2048, n_batch=64, n_ubatch=64, **changed)
    assert same_bits(logits_along(small, tokens[:1200], ()), logits_along(whole, tokens[:1200], ()))
    assert small.kvflash.page_outs > 0


def test_positions_that_are_stretched_are_those_of_upstream(llama: Any, stock: Any, tokens: Any) -> None:
    prompt, rest = tokens[:300], tokens[300:304]
    plain = logits_along(llama(kvflash=1024), prompt, rest)
    for given in (
        {"rope_scaling_type": 2, "rope_freq_scale": 0.25, "yarn_orig_ctx": 256},
        {"rope_scaling_type": 1, "rope_freq_scale": 0.5, "rope_freq_base": 2e5},
    ):
        ours = logits_along(llama(kvflash=1024, **given), prompt, rest)
        assert same_bits(ours, logits_along(stock(**given, **STOCK), prompt, rest))
        assert not same_bits(ours, plain)


def test_a_server_with_a_certificate_below_a_path(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl makes a certificate here")
    key, certificate, log = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "log"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True,
    )  # fmt: skip
    line = [sys.executable, "-m", "kvflash_ggml", "serve", str(MODELS / "recall-qwen3-q8_0.gguf"), "-c", "2048",
            "--kvflash", "512", "-t", "1", "--port", "0", "--ssl-key-file", str(key), "--ssl-cert-file",
            str(certificate), "--api-prefix", "/llm", "--log-file", str(log)]  # fmt: skip
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = next(said for said in server.stderr if "serving" in said).split()[-1]
            assert address.startswith("https://127.0.0.1:")
            assert address.endswith("/llm")
            trusted = ssl.create_default_context(cafile=str(certificate))

            def get(url: str, data: bytes | None = None) -> Any:
                asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
                with urllib.request.urlopen(asked, context=trusted, timeout=60) as reply:
                    return reply.read()

            assert b"<html" in get(address)
            body = json.dumps({"prompt": "The", "max_tokens": 3}).encode()
            assert json.loads(get(f"{address}/v1/completions", body))["usage"]["completion_tokens"] == 3
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(address.replace("/llm", "/health"))
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(address.replace("/llm", "/llms/health"))
            assert b'"finish": "length"' in log.read_bytes()
        finally:
            server.kill()
