"""The arithmetic of loss beside the full cache. No model is run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from kvflash_bench import main, report
from kvflash_bench.loss import Forced, divergence, summary
from kvflash_bench.outcomes import Arm


def forced(losses, likeliest, page_ins=0):
    return Forced(losses=np.array(losses, float), likeliest=np.array(likeliest), page_ins=page_ins)


FULL = [forced([1, 2], [7, 8]), forced([3, 5], [1, 2])]


def test_a_row():
    arm = Arm(policy="qk", context=4096, pool=512, note="small")
    row = summary(arm, [forced([1, 3], [7, 9], 4), forced([4, 6], [1, 2], 8)], FULL)
    assert row == {
        "context": 4096, "policy": "qk", "pool": 512, "documents": 2, "nats": 3.5, "more": pytest.approx(0.75),
        "error": pytest.approx(0.25), "agree": pytest.approx(0.75), "KL": 0.0, "page_ins": 6.0, "note": "small",
    }  # fmt: skip


def test_the_divergence_is_a_mean_over_documents_and_tokens():
    full, other = np.log([[0.5, 0.5], [0.5, 0.5]], dtype=np.float32), np.log([[0.5, 0.5], [0.2, 0.8]], dtype=np.float32)
    assert divergence(full, other) == pytest.approx(np.log(0.5 / 0.4) / 2)  # of both tokens: log(.5/.2) and log(.5/.8)
    assert divergence(full, full) == 0
    pool = [replace(one, divergence=nats) for one, nats in zip(FULL, (0.1, 0.3), strict=True)]
    assert summary(Arm(policy="qk", context=4096, pool=512), pool, FULL)["KL"] == pytest.approx(0.2)


def test_the_full_cache_agrees_with_itself():
    row = summary(Arm(policy="full", context=4096), FULL, FULL)
    assert (row["pool"], row["more"], row["error"], row["agree"]) == (None, 0, 0, 1)


def test_one_document_has_no_error():
    assert summary(Arm(policy="qk", context=4096, pool=512), FULL[:1], FULL[:1])["error"] == 0


def test_what_is_not_there_is_a_dash_in_a_table(capsys):
    report.table(("pool", "nats"), [(None, 2.5), (1024, 12.5)])
    assert capsys.readouterr().out == " pool   nats\n    -  2.500\n1,024   12.5\n"


@pytest.mark.parametrize("option", [["--documents", "0"], ["--tokens", "0"], ["--pools", "x"]])
def test_what_is_typed_wrong_is_named(option, tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"")
    result = CliRunner().invoke(main, ["loss", str(model), *option])
    assert result.exit_code == 2
    assert option[0] in result.output
