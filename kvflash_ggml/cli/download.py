"""Downloads of a hub into its cache folder, as huggingface_hub lays it out. Imported where something is fetched.

An interrupted file goes on where it stopped, in another process too, which huggingface_hub 2 does not do by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import WeakFileLock, build_hf_headers, disable_progress_bars  # type: ignore[attr-defined,unused-ignore]

from ..errors import HubError, brief
from ..files import replacing
from .terminal import stderr_is_terminal

# Before each request it would ask the hub which agents there are, to tell it which of them has started this process.
constants.HF_HUB_DISABLE_TELEMETRY = True

_SECONDS = 10
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9A-Za-z_-]{1,128}")
_MAGIC = b"GGUF"
_FAILURES: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, TypeError, *HfHubHTTPError.__bases__)
"""What an answer can cause: of requests or httpx, as the release of huggingface_hub has it, and of what reads it."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository as the hub describes it.

    folder: in the cache folder. names: of its files, with their sizes in bytes where the hub says them.
    """

    repo: str
    folder: Path
    commit: str
    names: Mapping[str, int | None]

    @classmethod
    def ask(cls, repo: str, folder: Path) -> Repository:
        """Ask the hub. HubError if it does not say."""
        with _in_words(repo):
            info = HfApi(endpoint=_endpoint()).model_info(repo, files_metadata=True, timeout=_SECONDS)
            commit, names = str(info.sha), {one.rfilename: one.size for one in info.siblings or ()}
        if _COMMIT.fullmatch(commit) is None:
            raise HubError(f"{_hub()} says that {repo} is at '{brief(commit)}', which is no commit: {_SUSPECT}")
        return cls(repo, folder, commit, names)

    def download(self, name: str, *, quiet: bool) -> Path:
        """Return the file in the cache folder; fetch what is missing of it. HubError if that fails."""
        link = self.folder / "snapshots" / self.commit / name
        if not link.exists():
            with _in_words(f"{self.repo}/{brief(name)}"):
                blob = self._fetched(name, quiet=quiet or not stderr_is_terminal())
            link.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another process was faster
                link.symlink_to(os.path.relpath(blob, link.parent))
        ref = self.folder / "refs" / "main"
        ref.parent.mkdir(exist_ok=True)
        with replacing(ref, sync=False) as file:
            file.write(self.commit.encode())
        return link

    def _fetched(self, name: str, *, quiet: bool) -> Path:
        url = hf_hub_url(self.repo, name, revision=self.commit, endpoint=_endpoint())
        told = get_hf_file_metadata(url, timeout=_SECONDS)
        etag, size = told.etag or "", told.size
        if _ETAG.fullmatch(etag) is None:
            raise HubError(f"{_hub()} gives {brief(name)} the ETag '{brief(etag)}', which names no file: {_SUSPECT}")
        if size is None or self.names[name] not in (None, size):
            raise HubError(
                f"{_hub()} says that {brief(name)} has {size} bytes, and lists it with {self.names[name]}: {_SUSPECT}"
            )
        if size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise HubError(
                f"{brief(name)} has {size} bytes, and a hub sends {constants.MAX_HTTP_DOWNLOAD_SIZE} at most: "
                f"hf download {self.repo} {brief(name)} fetches it into the same folder"
            )
        blob = self.folder / "blobs" / etag
        blob.parent.mkdir(parents=True, exist_ok=True)
        lock = self.folder.parent / ".locks" / self.folder.name / f"{etag}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        if quiet:
            disable_progress_bars()
        with WeakFileLock(lock):
            if not blob.exists():
                part = blob.with_name(f"{etag}.incomplete")
                _receive(url, part, size=size, name=name)
                part.replace(blob)
        return blob


def _receive(url: str, part: Path, *, size: int, name: str) -> None:
    """Append what is missing. A wrong file is removed, an incomplete one stays for the next time."""
    with part.open("ab") as file:
        try:
            http_get(
                url,
                file,
                resume_size=file.tell(),
                headers=build_hf_headers(),
                expected_size=size,
                displayed_filename=name.rpartition("/")[2],
            )
        except OSError as error:
            too_long = _status(error) == 416
            if too_long or (type(error) is OSError and error.errno is None):  # huggingface_hub's own, of wrong lengths
                part.unlink()
                raise HubError(
                    f"{_hub()} sends another length of {brief(name)} than the {size} bytes it named: try again"
                ) from error
            raise
    with part.open("rb") as file:
        begin = file.read(len(_MAGIC))
    if begin != _MAGIC:
        part.unlink()
        raise HubError(f"{brief(name)} is no GGUF file: it begins with {begin!r} instead of {_MAGIC!r}. {_SUSPECT}")


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _hub() -> str:
    return _endpoint() or constants.ENDPOINT


_SUSPECT = "see what HF_ENDPOINT says, and whether a proxy or a login page answers"


def _status(error: BaseException) -> int | None:
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Turn an answer that is of no use into a HubError. What the own disk refuses stays as it is."""
    try:
        yield
    except HubError:
        raise
    except _FAILURES as error:
        if isinstance(error, OfflineModeIsEnabled):
            raise HubError(f"{what} is not asked for, since HF_HUB_OFFLINE is set: unset it") from error
        if (status := _status(error)) is not None:
            raise HubError(f"{_hub()} answers {status} for {what}: {_remedy(status)}") from error
        if isinstance(error, OSError) and error.filename is not None:
            raise
        if isinstance(error, (ValueError, KeyError, TypeError)):
            raise HubError(f"{_hub()} answers what no hub does for {what}: {_SUSPECT}") from error
        raise HubError(
            f"{_hub()} cannot be reached for {what} ({error}): see whether the network and HF_ENDPOINT are right"
        ) from error


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "see whether the name is right; for a private or gated one set HF_TOKEN to a token that may read it"
    if status == 404:
        return "see whether the name is right"
    if status == 429:
        return "wait some minutes, or set HF_TOKEN, with which more is allowed"
    return "try again later" if status >= 500 else _SUSPECT
