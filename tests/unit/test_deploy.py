"""Files for other machines, none of which runs here: they are read, and what they name is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import golden_names

from kvflash_ggml.batching import messages
from kvflash_ggml.cli.serve import serve

REPO = Path(__file__).parents[2]
SERVICE = REPO / "deploy" / "kvflash.service"
IMAGES = [REPO / "Dockerfile", REPO / "deploy" / "cuda.Dockerfile"]
DASHBOARD = REPO / "deploy" / "grafana.json"
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
        matrix = job.get("strategy", {}).get("matrix", {})
        assert used <= {*matrix, *(name for row in matrix.get("include", ()) for name in row)}


def deployed(name: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which huggingface_hub brings")
    return yaml.safe_load((REPO / "deploy" / name).read_text(encoding="utf-8"))


def unknown(queries: list[str]) -> set[str]:
    """The metrics that queries of Prometheus name and no server tells; "" stands for a query that names none."""
    types = dict(line.split() for line in golden_names.metrics() if not line.startswith("#") and " " in line)
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    told = {name.removesuffix("_total") + end for name, kind in types.items() for end in suffixes[kind]}
    named = [re.findall(r"kvflash:\w+", query) or [""] for query in queries]
    return {name for names in named for name in names} - told


def test_queries_of_what_no_server_tells_are_found() -> None:
    assert (
        unknown(["rate(kvflash:page_ins_total[5m])", "kvflash:host_bytes > 0", "kvflash:restore_seconds_bucket"])
        == set()
    )
    assert unknown(["rate(kvflash:page_ins[5m])", "up == 0"]) == {"kvflash:page_ins", ""}


def test_the_dashboard_shows_what_a_server_tells() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert unknown([target["expr"] for panel in panels for target in panel["targets"]]) == set()
    assert unknown([one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]) == set()


def test_alerts_look_at_what_a_server_tells() -> None:
    (config,) = deployed("prometheus.yaml")["scrape_configs"]
    (group,) = deployed(*deployed("prometheus.yaml")["rule_files"])["groups"]
    queries = [rule["expr"] for rule in group["rules"]]
    assert [query for query in queries if f'job="{config["job_name"]}"' in query] == ['up{job="kvflash"} == 0']
    assert unknown([query for query in queries if not query.startswith("up{")]) == set()
    reasons = {
        reason for query in queries for one in re.findall(r'reason=~"([^"]*)"', query) for reason in one.split("|")
    }
    assert reasons == {messages.INTERNAL, messages.NUMERICAL}
    options = {option for param in serve.params for option in param.opts}
    advised = {word for rule in group["rules"] for word in re.findall(r"--[a-z-]+", str(rule["annotations"]))}
    assert advised <= {*options, "--store"}  # which kvflash-fleet adds
