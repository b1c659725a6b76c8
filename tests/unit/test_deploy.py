"""Files for other machines, none of which runs here: they are read, and what they name is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvflash_ggml.cli.serve import serve

REPO = Path(__file__).parents[2]
SERVICE = REPO / "deploy" / "kvflash.service"
IMAGES = [REPO / "Dockerfile", REPO / "deploy" / "cuda.Dockerfile"]
WORKFLOWS = sorted((REPO / ".github" / "workflows").iterdir())
VARIABLES = {param.envvar for param in serve.params}


@pytest.mark.parametrize("path", [SERVICE, *IMAGES], ids=lambda path: path.name)
def test_they_start_a_server_with_its_variables(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(r'kvflash-run"?,? "?serve', text)
    assert {*re.findall(r"KVFLASH_\w+", text)} <= VARIABLES


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_images_install_extras_that_there_are(path: Path) -> None:
    found = re.findall(r"\"(?:kvflash-ggml|/source(/\w+)?)\[([\w,]+)\]\"", path.read_text(encoding="utf-8"))
    assert found
    for folder, extras in found:
        known = (REPO / folder.strip("/") / "pyproject.toml").read_text(encoding="utf-8")
        assert [extra for extra in extras.split(",") if f"\n{extra} = [" not in known] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_can_read_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / SERVICE.name
    unit.write_text(SERVICE.read_text(encoding="utf-8").replace("/opt/kvflash/bin/kvflash-run", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if SERVICE.name in line]) == (0, [])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which huggingface_hub brings")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Not yet run")
    jobs = yaml.safe_load(text)["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    own = [word for line in lines for word in line.split() if word.startswith((".ci/", "scripts/"))]
    assert own
    assert [name for name in own if not (REPO / name).is_file()] == []
    for job in jobs.values():
        used = {*re.findall(r"matrix\.(\w+)", str(job))}
        matrix = job["strategy"]["matrix"]
        assert used <= {*matrix, *(name for row in matrix.get("include", ()) for name in row)}
