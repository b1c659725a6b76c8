"""Models of a hub: chooses the file of a repository, and finds it in the cache folder that programs share.

The download is in `download.py`, which needs huggingface_hub. Here nothing does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from .. import pip_line
from ..errors import HubError, brief
from .terminal import note

if TYPE_CHECKING:
    from .download import Repository

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w./-]+))?", re.ASCII)
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_QUANT = re.compile(r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[1-9]|TQ[12]|BF16|F16|F32|MXFP4|NVFP4)[A-Za-z0-9_]*)[-./]", re.I)
_DEFAULTS = ("Q4_K_M", "Q8_0")
_PROJECTOR = "mmproj"
_DRAFTERS = ("mtp-", "eagle3-", "dflash-", "dspark-")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of a hub. repo: OWNER/REPO. which: a quantisation or a file's name; "" for the usual one."""

    repo: str
    which: str

    def __str__(self) -> str:
        return f"{self.repo}:{self.which}" if self.which else self.repo

    def files(self, names: Collection[str]) -> list[str]:
        """Find the files of the model among those of its repository, the parts of a split one in their order.

        Raises:
            HubError: there is none, a part is missing, or a name leads out of the repository.
        """
        ggufs = [name for name in names if name.endswith(".gguf")]
        firsts = [name for name in ggufs if _part(name) in (None, 1)]
        if self.which.endswith(".gguf"):
            found = [name for name in ggufs if name == self.which]
        else:
            models = [name for name in firsts if not _beside(name)]
            quants = [self.which] if self.which else _DEFAULTS
            found = [name for quant in quants for name in models if _has(name, quant)]
            found = found or ([] if self.which else models)
        if not found:
            self._refuse(firsts)
        return [_checked(self.repo, name) for name in self._parts(found[0], names)]

    def _parts(self, name: str, names: Collection[str]) -> list[str]:
        match = _PART.fullmatch(name)
        if match is None:
            return [name]
        parts = [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]
        for number, part in enumerate(parts, 1):
            if part not in names:
                raise HubError(
                    f"{self.repo}: part {number} of {len(parts)} of {brief(name)} is missing: name another quantisation"
                )
        return parts

    def _refuse(self, ggufs: list[str]) -> None:
        quants = list(dict.fromkeys(quant for name in ggufs if not _beside(name) for quant in _quants(name)))
        if not ggufs:
            raise HubError(
                f"{self.repo} has no .gguf file: name a repository that has, often with -GGUF at its end, or make a "
                "file with kvflash-convert model"
            )
        choice = quants or ggufs
        listed = brief(", ".join(choice))
        raise HubError(f"{self} is not there; the repository has {listed}: name one, as {self.repo}:{brief(choice[0])}")

    def tell_beside(self, names: Collection[str]) -> None:
        """Note on stderr which files of the repository belong to the model: a projector, and drafters."""
        for name in sorted(name for name in names if name.endswith(".gguf")):
            kind = _beside(name)
            if kind == _PROJECTOR:
                note(f"{brief(name)}: a projector; kvflash-run pull {self.repo}:{brief(name)} fetches it for --mmproj")
            elif kind in _DRAFTERS:
                note(f"{brief(name)}: a drafter; kvflash-run pull {self.repo}:{brief(name)} fetches it for -md")


def hub_model(text: str) -> HubModel:
    """Read OWNER/REPO, OWNER/REPO:QUANT or OWNER/REPO:FILE.gguf. ValueError for any other text."""
    match = _NAME.fullmatch(text.strip())
    if match is None or ".." in text or "--" in match[1]:
        raise ValueError(f"{text!r} is no model of a hub: write OWNER/REPO, OWNER/REPO:Q4_K_M or OWNER/REPO:FILE.gguf")
    return HubModel(match[1], match[2] or "")


def fetch(model: HubModel, *, quiet: bool) -> Path:
    """Return the model's first file in the hub's cache folder; download what is missing.

    If the hub does not answer, or refuses, use the copy in the folder, and note that on stderr.

    Raises:
        HubError: the model cannot be had.
    """
    try:
        repository = _ask(model.repo)
        names = model.files(repository.names)
    except HubError as error:
        here = next(_copies(model), None)
        if here is None:
            raise
        note(f"{error}; the copy in {cache_dir()} is used")
        return here[0]
    if not quiet:
        model.tell_beside({*repository.names} - {*names})
    paths = [repository.download(name, quiet=quiet) for name in names]
    return paths[0]


def _ask(repo: str) -> Repository:
    try:
        from .download import Repository
    except ModuleNotFoundError as err:
        raise HubError(
            f"{repo} needs the package {err.name}, which is not installed: {pip_line.install('hub')}"
        ) from err
    return Repository.ask(repo, repo_dir(repo))


def located(model: str | HubModel, *, quiet: bool) -> str:
    """Return the path of a model; fetch one of a hub."""
    return str(fetch(model, quiet=quiet)) if isinstance(model, HubModel) else model


def cache_dir() -> Path:
    """Return the hub's cache folder, by the variables that huggingface_hub has for it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(name):
            return Path(folder).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def repo_dir(repo: str) -> Path:
    """Return the folder of a repository in the hub's cache folder."""
    return cache_dir() / f"models--{repo.replace('/', '--')}"


def repositories() -> list[str]:
    """List the repositories of models in the hub's cache folder, in the order of their names."""
    folders = (path.name.split("--", 2) for path in cache_dir().glob("models--*--*"))
    return sorted(f"{owner}/{name}" for _models, owner, name in folders)


def _revisions(repo: str) -> list[dict[str, Path]]:
    """List the .gguf files in the cache folder by name, a dictionary a revision: main, and then the newest."""
    folder = repo_dir(repo)
    ref = folder / "refs" / "main"
    main = ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""
    snapshots = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    snapshots.sort(key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)
    return [dict(_ggufs(path)) for path in snapshots]


def _copies(model: HubModel) -> Iterator[list[Path]]:
    """Yield the files of a model in the cache folder, once for each revision that has all of them."""
    for here in _revisions(model.repo):
        with suppress(HubError):
            yield [here[name] for name in model.files(here)]


def _ggufs(snapshot: Path) -> Iterator[tuple[str, Path]]:
    """Yield the .gguf files of a snapshot. A link without its file, left by programs that tidied up, is none."""
    for path in sorted(snapshot.rglob("*.gguf")):
        if path.is_file():
            yield path.relative_to(snapshot).as_posix(), path


def models_of(repo: str) -> dict[str, list[Path]]:
    """Return each model of a repository in the cache folder by its name, and its files, as `list` shows them."""
    names = sorted({name for here in _revisions(repo) for name in here if _part(name) in (None, 1)})
    found = {str(model): next(_copies(model), None) for model in (HubModel(repo, name) for name in names)}
    return {name: paths for name, paths in found.items() if paths is not None}


def remove(model: HubModel) -> list[Path]:
    """Remove a model from the cache folder, or all .gguf files of its repository, of each revision. Return their links.

    Raises:
        HubError: it is not there.
    """
    revisions = _revisions(model.repo)
    links = [path for here in revisions for path in here.values()]
    gone = [path for paths in _copies(model) for path in paths] if model.which else links
    if not gone:
        if links:
            model.files({name for here in revisions for name in here})
        raise HubError(f"{model} is not in {cache_dir()}: kvflash-run list shows what is")
    blobs = {_blob(path) for path in gone} - {_blob(path) for path in links if path not in gone}
    for path in (*gone, *(blob for blob in blobs if blob.is_relative_to(repo_dir(model.repo)))):
        path.unlink(missing_ok=True)
    return gone


def _blob(path: Path) -> Path:
    """Return what a link names. It may be a link itself, to a file that repositories share and that stays."""
    return Path(os.path.normpath(path.parent / path.readlink())) if path.is_symlink() else path


def _part(name: str) -> int | None:
    match = _PART.fullmatch(name)
    return None if match is None else int(match[2])


def _beside(name: str) -> str | None:
    """Return what a file is if it is no model of its own; `imatrix` for the figures of a quantisation."""
    base = PurePosixPath(name).name.lower()
    return next((kind for kind in (_PROJECTOR, "imatrix", *_DRAFTERS) if kind in base), None)


def _has(name: str, quant: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}[-./]", name, re.IGNORECASE) is not None


def _quants(name: str) -> list[str]:
    return _QUANT.findall(name)[-1:]


def _checked(repo: str, name: str) -> str:
    if not name.isprintable() or "\\" in name or {"", ".", ".."} & {*name.split("/")}:
        raise HubError(f"{repo} names the file '{brief(name)}', which leads out of the repository: do not use it")
    return name
