"""A server that says what a script tells it to, for programs that are to call their tools: `python scripted.py FILE`.

The file has `{"calls": [[name, arguments], ...], "end": text}`. A request with tools gets the call that follows the
results in it, and the text behind the last; one without tools gets the text.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kvflash_ggml.server.run import listen, serve
from kvflash_ggml.server.settings import ServerSettings
from support.fake_model import FakeModel, FakePrompts


def main(script: Path) -> None:
    said = json.loads(script.read_text(encoding="utf-8"))
    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in said["calls"]]

    def reply(prompt: bytes) -> bytes:
        if not prompt.startswith(b"tools\n"):
            return str(said["end"]).encode()
        done = len(re.findall(rb"^tool: ", prompt, re.MULTILINE))
        if done >= len(calls):
            return str(said["end"]).encode()
        return f"Step {done + 1}.\n<tool_call>\n{calls[done]}\n</tool_call>".encode()

    settings = ServerSettings(alias="scripted", port=0)
    model = FakeModel(n_ctx=1 << 20, reply=reply)
    with listen(settings) as sock:
        serve(
            model,
            FakePrompts(),
            settings,
            sock,
            found=lambda count: None,
            ready=lambda address: print(address, flush=True),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
