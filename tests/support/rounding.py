"""What differs on a GPU: how far rounding may bring two results apart, by name, and which tests have no meaning there.

A CPU computes most of what is compared here to the same bits. CUDA has other kernels for steps of other widths, fuses
nodes by where their buffers lie, and scores chunks beside the decode.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

GPU_LAYERS = int(os.environ.get("KVFLASH_TEST_GPU_LAYERS", "0"))
"""Layers on the GPU; `scripts/test --gpu` asks for all."""

ON_GPU = GPU_LAYERS > 0

FUSES = ON_GPU and os.environ.get("GGML_CUDA_DISABLE_FUSION", "0") in ("", "0")
"""Does it depend on where buffers lie which nodes are computed by one kernel, and so how they are rounded?"""


Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The largest difference that is rounding: on a CPU, on a GPU, and the largest `seen` on an H200, if one was noted.

    cpu: 0 for the same bits. layout: only fused nodes make the difference, so that without fusion a GPU has the bits of
    a CPU's bound.
    """

    cpu: float
    gpu: float
    why: str
    seen: float | None = None
    layout: bool = False

    @property
    def here(self) -> float:
        """What holds in this run."""
        return self.gpu if (FUSES if self.layout else ON_GPU) else self.cpu


LOGPROB = Bound(cpu=0.05, gpu=0.4, seen=0.1, why="a log probability, from steps of other widths or beside other texts")
TIE = Bound(cpu=0.05, gpu=0.2, seen=0.1, why="log probabilities of two tokens that change places in other steps")
DRAFT_TIE = Bound(cpu=0, gpu=0.2, why="the same of a drafter's tokens, whose rows came in other steps")
LOGITS = Bound(cpu=0.02, gpu=0.04, seen=0.02, why="share of the largest logit, from steps of other widths")
LAYOUT = Bound(cpu=0, gpu=0.02, layout=True, why="share of the largest logit, from the same steps in other buffers")
MASS = Bound(cpu=1e-3, gpu=0.1, why="log of attention: queries are rounded to the keys' type, each device in its way")
MASS_OF_F16 = Bound(cpu=5e-3, gpu=0.1, why="the same beside numpy, by keys of F16")
MASS_OF_Q8 = Bound(cpu=0.1, gpu=0.1, why="the same beside numpy, by keys of Q8_0")
IMAGE = Bound(
    cpu=0, gpu=0.05, why="share of the largest logit, behind an image or a sound in a model of random weights"
)
BLOCK = Bound(cpu=0, gpu=0.3, why="drafts of a block that are accepted, on average: blocks of another length")
F32_LOGPROB = Bound(cpu=1e-4, gpu=0.02, seen=6e-3, why="a log probability of an F32 model, beside numpy's in F64")
NATS = Bound(cpu=0, gpu=1e-3, seen=7e-6, why="nats of a text, where the same is seen in steps of other widths")
NEARLY_ALL = Bound(cpu=1e-3, gpu=1e-3, seen=5e-4, why="nats of a text, where nearly the same is seen")


SAID = "It is red."
"""On a GPU the turn of an assistant in a chat whose answers are compared: a near tie may change what it has said."""


def near(mine: Floats, its: Floats, bound: Bound) -> bool:
    """Are logits the same up to a share of the largest one? A bound of 0 asks for the same bits."""
    if bound.here == 0:
        return mine.tobytes() == its.tobytes()
    return bool(np.abs(mine - its).max() <= bound.here * np.abs(its).max())


def assert_same_answer(mine: tuple[str, Floats], its: tuple[str, Floats]) -> None:
    """Two answers that follow an image or a sound, each with its last logits."""
    assert near(mine[1], its[1], IMAGE), f"the largest difference is {np.abs(mine[1] - its[1]).max()}"
    assert mine[0] == its[0] or ON_GPU, "on a GPU it may be the other one of two that are nearly as likely"


where_widths_agree = pytest.mark.skipif(ON_GPU, reason="rows of steps of other widths are computed by other kernels")
without_fusion = pytest.mark.skipif(
    FUSES, reason="another layout of buffers lets CUDA fuse other nodes: GGML_CUDA_DISABLE_FUSION=1 forbids it"
)
