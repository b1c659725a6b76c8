"""Replicas of a server behind Ray Serve. Each replica runs `kvflash-run serve`, and passes requests on to it.

serve run ray_serve:build model=/models/model.gguf replicas=2 gpus=1 options="--kvflash auto --parallel 4"

Requests with the same header x-session-id go to one replica, which knows the conversation.
"""

import asyncio
import ctypes
import shlex
import signal
import socket
import subprocess
import sys

import aiohttp
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig

app = FastAPI()
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def end_with_parent() -> None:
    """Have Linux end this process when its parent has gone, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@serve.deployment(
    max_ongoing_requests=64,
    health_check_period_s=1,
    request_router_config=RequestRouterConfig(request_router_class=ROUTER),
)
@serve.ingress(app)
class Replica:
    async def __init__(self, model: str, options: str) -> None:
        port = free_port()
        line = [sys.executable, "-m", "kvflash_ggml", "serve", model, "--port", str(port), *shlex.split(options)]
        self.server = subprocess.Popen(line, preexec_fn=end_with_parent)
        self.client = aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout(total=None))
        await self.loaded()

    async def check_health(self) -> None:
        """Ray starts another replica when this fails."""
        if self.server.poll() is not None:
            raise RuntimeError(f"the server has ended with {self.server.returncode}: its log says why")

    async def loaded(self) -> None:
        """Wait until the server takes requests."""
        while True:
            await self.check_health()
            try:
                async with self.client.get("/health") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.2)

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def forward(self, request: Request) -> StreamingResponse:
        path = request.url.path + ("?" + request.url.query if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        try:
            reply = await self.client.request(request.method, path, data=await request.body(), headers=headers)
        except aiohttp.ClientConnectionError as error:
            raise HTTPException(503, "the server of this replica has ended, and is started again: ask again") from error

        async def body():
            try:
                async for piece in reply.content.iter_any():
                    yield piece
            finally:
                reply.close()  # a client that has left ends its answer

        told = {name: value for name, value in reply.headers.items() if name.lower() not in HOP_BY_HOP}
        return StreamingResponse(body(), reply.status, told)


def build(args: dict[str, str]) -> serve.Application:
    replicas, gpus = int(args.get("replicas", 1)), float(args.get("gpus", 0))
    replica = Replica.options(num_replicas=replicas, ray_actor_options={"num_gpus": gpus})
    return replica.bind(args["model"], args.get("options", ""))
