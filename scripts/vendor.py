#!/usr/bin/env python3
"""The pinned upstream source: fetch it, patch it, build it, keep the patches honest.

Standard library only. Messages go to stderr, the answer (usually a path) to stdout.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from vendoring import build, patches, source, stock
from vendoring.pin import REPO, Pin, VendorError, load_pin, log
from vendoring.toolchain import Toolchain, portable_defines, user_defines


def main(argv: list[str] | None = None) -> int:
    """Run one verb; 0 on success, 1 with an explanation on stderr otherwise."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options) or 0)
    except VendorError as error:
        log(f"error: {error}")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    fetch = verbs.add_parser("fetch", help="verified sdist: KVFLASH_SDIST, the cache, or the index")
    fetch.set_defaults(run=_fetch)

    apply = verbs.add_parser("apply", help="extract and patch; prints the folder")
    apply.add_argument("--to", type=Path, help="a new folder of your own to edit, for refresh")
    apply.set_defaults(run=_apply)

    refresh = verbs.add_parser("refresh", help="write an edited tree back into the patches")
    refresh.add_argument("tree", type=Path, nargs="?", help="folder from apply --to")
    refresh.add_argument("--into", metavar="PATCH", help="patch that takes newly touched files")
    refresh.set_defaults(run=_refresh)

    check = verbs.add_parser("check", help="everything a reviewer would have to check by hand")
    check.set_defaults(run=_check)

    for name, text in (
        ("build", "build the libraries into the cache"),
        ("tool", "build a program of upstream's and print its path"),
        ("stock", "build llama-batched-bench, llama-server and llama-bench unpatched; prints their folder"),
        ("key", "print the build key"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("--define", action="append", default=[], metavar="NAME=VALUE")
        verb.add_argument("--cmake", default="cmake")
        verb.add_argument("--generator", default="Ninja" if shutil.which("ninja") else None)
        verb.add_argument("--make-program")
        verb.add_argument(
            "--portable",
            action="store_true",
            default=os.environ.get("KVFLASH_PORTABLE") == "1",
            help="for any CPU of this architecture, not this machine's alone (also: KVFLASH_PORTABLE=1)",
        )
        verb.set_defaults(run=_key)
        if name == "build":
            verb.add_argument("--out", type=Path, help="lay out what the wheel carries in this folder")
            verb.set_defaults(run=_build)
        if name == "stock":
            verb.set_defaults(run=_stock)
        if name == "tool":
            verb.add_argument("tool", choices=["test-llama-archs"])
            verb.set_defaults(run=_tool)
    return parser


def _fetch(_: argparse.Namespace) -> None:
    print(source.fetch())


def _apply(options: argparse.Namespace) -> None:
    tree = source.llama_source(source.patched_tree())
    if options.to:
        if options.to.exists():
            raise VendorError(f"{options.to} exists; give a new folder")
        shutil.copytree(tree, options.to)
        tree = options.to
    print(tree)


def _refresh(options: argparse.Namespace) -> None:
    tree = options.tree or source.patched_tree() / source.LLAMA
    if not tree.is_dir():
        raise VendorError(f"no such folder: {tree}. Make one with: scripts/vendor.py apply --to {tree}")
    base = source.pristine_tree() / source.LLAMA
    changed = patches.refresh(base, tree, patches.read_series(), options.into)
    log(f"rewrote {', '.join(changed)}" if changed else "every patch is already what the tree says")


def _check(_: argparse.Namespace) -> int:
    pin = load_pin()
    series = patches.read_series()
    found = patches.problems(source.pristine_tree(pin) / source.LLAMA, series)
    found += _pin_problems(pin) + _stray_files()
    for problem in found:
        log(f"check: {problem}")
    if not found:
        log(f"check: {len(series)} patches on {pin.requirement}, all rules kept")
    return 1 if found else 0


def _pin_problems(pin: Pin) -> list[str]:
    """pyproject.toml is the only other place that may name the version, and it must agree."""
    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'"llama[-_]cpp[-_]python(?:\[\w+\])?([^"]*)"', text)
    wrong = [n for n in named if n != f"=={pin.version}"]
    return [f"pyproject.toml asks for llama-cpp-python{w}, pin is =={pin.version}" for w in wrong]


def _stray_files() -> list[str]:
    allowed = {".gitignore", "README.md", "pin.toml"}
    inside = (p for p in (REPO / "vendor").rglob("*") if p.is_file())
    return [f"{p.relative_to(REPO)}: nothing of upstream lives here" for p in inside if p.name not in allowed]


def _toolchain(options: argparse.Namespace) -> Toolchain:
    defines = user_defines(options.define)
    return Toolchain(
        defines=portable_defines(defines) if options.portable else defines,
        cmake=options.cmake,
        generator=options.generator,
        make_program=options.make_program,
    )


def _build(options: argparse.Namespace) -> None:
    plan = build.plan(_toolchain(options))
    build.build(plan)
    if options.out:
        build.assemble(plan, options.out)
    print(options.out or plan.out)


def _tool(options: argparse.Namespace) -> None:
    print(build.build_tool(build.plan(_toolchain(options)), options.tool))


def _stock(options: argparse.Namespace) -> None:
    print(stock.build_stock(_toolchain(options)))


def _key(options: argparse.Namespace) -> None:
    print(build.native_key(build.plan(_toolchain(options))))


if __name__ == "__main__":
    sys.exit(main())
