"""The patch series: apply it with zero fuzz, and write an edited tree back into the same files.

A patch is a header (see `FIELDS`), then a diff in one canonical form: `git diff` with three lines
of context, files in path order, no ``index`` lines (they depend on the repository, not the change).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .pin import REPO, VendorError, digest

PATCHES = REPO / "patches"
FIELDS = ("Why", "Touches", "Upstream", "Remove when", "Guarding test")
MAX_CHANGED = 60

_GIT_ENV = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}


@dataclass(frozen=True, slots=True)
class Patch:
    """One file of the series."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """File name, as listed in the series."""
        return self.path.name

    @property
    def _cut(self) -> int:
        start = re.search(r"^diff --git ", self.text, re.MULTILINE)
        return start.start() if start else len(self.text)

    @property
    def header(self) -> str:
        """Everything before the diff."""
        return self.text[: self._cut]

    @property
    def diff(self) -> str:
        """The diff alone."""
        return self.text[self._cut :]

    @property
    def files(self) -> tuple[str, ...]:
        """Paths the patch touches, relative to the llama.cpp root, in patch order."""
        return tuple(re.findall(r"^diff --git a/(\S+) b/", self.diff, re.MULTILINE))

    @property
    def changed(self) -> int:
        """Added plus removed lines."""
        body = re.findall(r"^[+-](?!\+\+ |-- ).*$", self.diff, re.MULTILINE)
        return len(body)

    def field(self, name: str) -> str:
        """A header field with its continuation lines joined, or an empty string."""
        pattern = rf"^{name}:(.*?)(?=^(?:{'|'.join(FIELDS)}):|\n\n|\Z)"
        found = re.search(pattern, self.header, re.MULTILINE | re.DOTALL)
        return " ".join(found.group(1).split()) if found else ""


def read_series(folder: Path = PATCHES) -> list[Patch]:
    """The patches in order; a missing or empty ``series`` file means none."""
    series = folder / "series"
    if not series.is_file():
        return []
    lines = (line.split("#")[0].strip() for line in series.read_text(encoding="utf-8").splitlines())
    names = [line for line in lines if line]
    listed, present = set(names), {p.name for p in folder.glob("*.patch")}
    if listed != present:
        odd = ", ".join(sorted(listed ^ present))
        raise VendorError(f"patches/series and the files in patches/ disagree about: {odd}")
    return [Patch(folder / n, (folder / n).read_text(encoding="utf-8")) for n in names]


def series_hash(series: Sequence[Patch]) -> str:
    """Digest of names and diffs, not of headers: a better explanation rebuilds nothing."""
    return digest(*(part for patch in series for part in (patch.name, patch.diff)))


def apply_series(series: Sequence[Patch], tree: Path) -> None:
    """Apply every patch to the llama.cpp root `tree`; raise at the first that does not fit."""
    for patch in series:
        apply_patch(patch, tree)


def apply_patch(patch: Patch, tree: Path) -> None:
    """Apply one patch to `tree`: the context must match exactly. One that is only a header so far changes nothing."""
    if not patch.diff:
        return
    before = _contents(patch, tree)
    if git := shutil.which("git"):
        # The ceiling hides any repository around the tree: inside one, git skips files silently.
        env = os.environ | _GIT_ENV | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
        command = [git, "apply", "--whitespace=nowarn", "-"]
    elif tool := shutil.which("patch"):
        env = dict(os.environ)
        command = [tool, "-p1", "-F0", "--batch", "--forward", "--no-backup-if-mismatch", "-r", "-"]
    else:
        raise VendorError("applying the patches needs git or patch: install either")
    done = subprocess.run(command, cwd=tree, env=env, input=patch.diff, text=True, capture_output=True)
    if done.returncode:
        detail = (done.stderr + done.stdout).strip()
        raise VendorError(f"patches/{patch.name} does not apply at zero fuzz:\n{detail}")
    if _contents(patch, tree) == before:
        raise VendorError(f"patches/{patch.name} changed nothing in {tree}")


def refresh(base: Path, edited: Path, series: Sequence[Patch], into: str | None = None) -> list[str]:
    """Rewrite the diffs of `series` so that applying them to `base` gives `edited`.

    A change belongs to the last patch that touches its file; `into` names the patch that takes
    files no patch touches yet. Headers are kept. Returns the names of the patches that changed.
    """
    owner = {file: patch.name for patch in series for file in patch.files}
    fresh = _untouched_changes(base, edited, set(owner))
    if fresh and into not in {p.name for p in series}:
        raise VendorError(
            "changed files that no patch touches: " + ", ".join(fresh) + ". Say which patch takes "
            "them: refresh --into NNNN-topic.patch"
        )
    owner |= dict.fromkeys(fresh, into or "")
    rewritten = []
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        _copy(base, a, owner)
        _copy(base, b, owner)
        for patch in series:
            apply_patch(patch, b)
            mine = [file for file, name in owner.items() if name == patch.name]
            _copy(edited, b, mine)
            text = patch.header + canonical_diff(a, b)
            if text != patch.text:
                patch.path.write_text(text, encoding="utf-8")
                rewritten.append(patch.name)
            shutil.rmtree(a)
            shutil.copytree(b, a)
    return rewritten


def canonical_diff(a: Path, b: Path) -> str:
    """Diff of two sibling folders named ``a`` and ``b`` in the form patches are kept in."""
    git = shutil.which("git")
    if git is None:
        raise VendorError("refreshing patches needs git")
    done = subprocess.run(
        [git, "diff", "--no-index", "--no-prefix", "--no-color", "--no-ext-diff", "--no-renames",
         "--diff-algorithm=myers", "-U3", a.name, b.name],
        cwd=a.parent, capture_output=True, text=True,
        env=os.environ | _GIT_ENV | {"GIT_CEILING_DIRECTORIES": str(a.parent.parent)},
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise VendorError(f"git diff failed: {done.stderr.strip()}")
    return re.sub(r"^index .*\n", "", done.stdout, flags=re.MULTILINE)


def problems(base: Path, series: Sequence[Patch], *, repo: Path = REPO) -> list[str]:
    """Everything that breaks a rule of ``patches/README.md``, one sentence each."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        files = {file for patch in series for file in patch.files}
        _copy(base, a, files)
        _copy(base, b, files)
        for patch in series:
            found += [f"{patch.name}: no '{f}:' in the header" for f in FIELDS if not patch.field(f)]
            if patch.changed > MAX_CHANGED:
                found.append(f"{patch.name}: {patch.changed} changed lines (limit {MAX_CHANGED})")
            if test := patch.field("Guarding test"):
                found += _missing_test(patch.name, test, repo)
            try:
                apply_patch(patch, b)
            except VendorError as error:
                found.append(str(error))
                break
            if canonical_diff(a, b) != patch.diff:
                found.append(f"{patch.name}: not in canonical form; run scripts/vendor.py refresh")
            shutil.rmtree(a)
            shutil.copytree(b, a)
    return found


def _missing_test(name: str, test: str, repo: Path) -> list[str]:
    """A guarding test is ``tests/path.py::function``."""
    path, _, function = test.partition("::")
    file = repo / path
    if not file.is_file():
        return [f"{name}: guarding test file {path} does not exist"]
    leaf = function.split("::")[-1].split("[")[0]
    if not re.search(rf"\bdef {re.escape(leaf)}\b", file.read_text(encoding="utf-8")):
        return [f"{name}: {path} has no test '{leaf}'"]
    return []


def _untouched_changes(base: Path, edited: Path, touched: set[str]) -> list[str]:
    def listing(root: Path) -> dict[str, Path]:
        found = (p for p in root.rglob("*") if p.is_file())
        return {p.relative_to(root).as_posix(): p for p in found}

    old, new = listing(base), listing(edited)
    return sorted(
        name
        for name in (old.keys() | new.keys()) - touched
        if name not in old or name not in new or old[name].read_bytes() != new[name].read_bytes()
    )


def _contents(patch: Patch, tree: Path) -> list[bytes | None]:
    return [(tree / f).read_bytes() if (tree / f).is_file() else None for f in patch.files]


def _copy(source: Path, target: Path, files: Iterable[str]) -> None:
    """Make the listed files of `target` what they are in `source`, absent ones included."""
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        (target / file).unlink(missing_ok=True)
        if (source / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / file, target / file)
            shutil.copymode(source / file, target / file)
