"""`kvflash-run rpc`: lends the devices of this machine to another, and checks the devices of another."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .. import remote, system
from ..native import library
from ..native import remote as servers
from .child import check_first_run
from .model import plain_errors
from .sections import HELP
from .terminal import note

if TYPE_CHECKING:
    from ..native.info import DeviceInfo

MIB = 1 << 20


@click.group(context_settings=HELP)
def rpc() -> None:
    """Serve devices to another machine, or check a server."""


@rpc.command(context_settings={"auto_envvar_prefix": "KVFLASH_RPC"})
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="IPv4 address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=remote.PORT,
    show_default=True,
    metavar="N",
    help="Port to listen at; 0 is any free one.",
)
@click.option("--device", multiple=True, metavar="NAME", help="May be repeated.  [default: the GPUs, or the CPU]")
@click.option("-t", "--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: half of them]")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep large weights there, so that the next load need not send them.",
)
@click.option("--trust-network", is_flag=True, help="Listen at an address that other machines can reach.")
def serve(
    *, host: str, port: int, device: tuple[str, ...], threads: int | None, cache: Path | None, trust_network: bool
) -> None:
    """Lend this machine's devices to one client after the other, until Ctrl-C or SIGTERM.

    \b
    There is neither a password nor encryption: anybody who reaches the port controls this machine.
    Other machines should come through a tunnel: ssh -N -L 50052:127.0.0.1:50052 THIS-HOST
    """
    try:
        outside = not remote.is_loopback(host)
    except ValueError as err:
        raise click.UsageError(f"--host {host} is no IPv4 address: write it in numbers, as 127.0.0.1") from err
    tunnel = remote.TUNNEL.format(port=port or "PORT")
    if outside and not trust_network:
        raise click.UsageError(
            f"--host {host} can be reached by other machines. {remote.RISK}. Use a tunnel ({tunnel} on the client), "
            "or add --trust-network"
        )
    with plain_errors(verbose=False):
        check_first_run()
        library.load()
        from ..native.devices import devices

        known = {one.name: one for one in devices()}
        names = device or tuple(library.gpu_devices()) or ("CPU",)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise click.UsageError(f"there is no device {', '.join(unknown)}: this machine has {', '.join(known)}")
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
        if outside:
            note(f"warning: {remote.RISK}. A tunnel is safer: {tunnel} on the client, and --host 127.0.0.1 here")
        port = port or remote.free_port(host)
        for name in names:
            click.echo(_described(known[name]))
        version = ".".join(map(str, remote.PROTOCOL))
        click.echo(f"serving at {host}:{port}, protocol {version}")
        # the native call never returns to Python, which would act on these
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threads = threads or max(1, system.cores() // 2)
        servers.serve(host, port, devices=names, threads=threads, cache=cache)


def _described(device: DeviceInfo) -> str:
    memory = f"{device.free_bytes // MIB:,} of {device.total_bytes // MIB:,} MiB free"
    return f"{device.name}: {device.description}, {memory}"


@rpc.command()
@click.argument("server", metavar="HOST:PORT")
@click.option("--rpc-trust", is_flag=True, help="Even if it is neither on this machine nor in a private network.")
def check(server: str, *, rpc_trust: bool) -> None:
    """Connect to a server: its protocol, devices and memory, how far it is, and whether it computes.

    The exit code is 2 if it cannot be used.
    """
    with plain_errors(verbose=False):
        endpoint = remote.find(server, trust=rpc_trust)
        version = remote.hello(endpoint)
        click.echo(f"{server}: protocol {'.'.join(map(str, version))}")
        check_first_run()
        with servers.connected([endpoint]):
            for device in servers.served(endpoint):
                click.echo(_described(device))
            for name, speed in servers.measure(endpoint):
                click.echo(
                    f"{name}: round trip {speed.round_trip * 1e3:.2f} ms, {speed.sent / MIB:,.0f} MiB/s there, "
                    f"{speed.received / MIB:,.0f} MiB/s back; attends and writes rows with {', '.join(speed.types)}"
                )
