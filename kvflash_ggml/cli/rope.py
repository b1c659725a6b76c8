"""Options of RoPE, for contexts longer than the trained length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from .. import notation
from ..errors import ConversionError
from ..gguf import reader
from ..settings import in_section
from .terminal import note

_rope = in_section("RoPE")

SCALING = {"none": 0, "linear": 1, "yarn": 2}


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """llama.cpp's settings of RoPE. What is not given is the model's own."""

    yarn: bool = _rope(
        bool, default=False, help="Stretch the positions by YaRN, as far as -c exceeds the trained length."
    )
    rope_scaling: str | None = _rope(
        tuple(SCALING), metavar="|".join(SCALING), help="How positions are stretched.  [default: the model's own]"
    )
    rope_scale: float | None = _rope(
        float, least=0, above=True, metavar="N", help="Stretch the context by this factor."
    )
    rope_freq_base: float | None = _rope(float, least=0, above=True, metavar="N", help="Base of the frequencies.")
    rope_freq_scale: float | None = _rope(
        float, least=0, above=True, metavar="N", help="Multiply the frequencies by N, the inverse of --rope-scale."
    )
    yarn_orig_ctx: int | None = _rope(notation.tokens, least=1, help="YaRN: the trained length.")
    yarn_ext_factor: float | None = _rope(float, least=-1, help="YaRN: extrapolation; 0 is interpolation alone.")
    yarn_attn_factor: float | None = _rope(float, least=-1, help="YaRN: scale of the attention.")
    yarn_beta_slow: float | None = _rope(float, least=-1, help="YaRN: high correction dimension, alpha.")
    yarn_beta_fast: float | None = _rope(float, least=-1, help="YaRN: low correction dimension, beta.")

    def rope_settings(self) -> dict[str, Any]:
        """Return keywords of `Llama` for what was given. UsageError for a contradiction."""
        scale = self.rope_freq_scale
        if self.rope_scale is not None:
            if scale is not None:
                raise click.UsageError("--rope-scale N is --rope-freq-scale 1/N: give one of them")
            scale = 1 / self.rope_scale
        given = {
            "rope_scaling_type": None if self.rope_scaling is None else SCALING[self.rope_scaling],
            "rope_freq_base": self.rope_freq_base,
            "rope_freq_scale": scale,
            "yarn_orig_ctx": self.yarn_orig_ctx,
            "yarn_ext_factor": self.yarn_ext_factor,
            "yarn_attn_factor": self.yarn_attn_factor,
            "yarn_beta_slow": self.yarn_beta_slow,
            "yarn_beta_fast": self.yarn_beta_fast,
        }
        return {name: value for name, value in given.items() if value is not None}

    def for_model(self, path: str, n_ctx: int, *, quiet: bool = False) -> dict[str, Any]:
        """Return keywords of `Llama` for a context of `n_ctx` tokens, 0 for as many as the model was trained for.

        Notes on stderr which factor a longer context would need. UsageError for --yarn where nothing is stretched, or
        beside other settings.
        """
        given = self.rope_settings()
        trained, longest = lengths(path)
        if self.yarn:
            if given:
                raise click.UsageError("--yarn finds the settings of RoPE: leave out the others, or --yarn")
            if not trained or n_ctx <= trained:
                known = f"the model was trained for {trained:,} tokens" if trained else "the file says no length"
                raise click.UsageError(f"--yarn stretches positions beyond the training, and {known}: say a larger -c")
            return replace(self, rope_scaling="yarn", rope_scale=n_ctx / trained, yarn_orig_ctx=trained).rope_settings()
        if longest and n_ctx > longest and not given and not quiet:
            note(
                f"-c {n_ctx} exceeds the {longest:,} tokens that the model was made for: answers get worse beyond"
                f" them. --yarn stretches its positions {n_ctx / trained:.3g} times"
            )
        return given


def lengths(path: str) -> tuple[int, int]:
    """Read the length of the training, before any scaling of the model's own, and the context that it is made for.

    0 where the file does not say it, or cannot be read: that error is told when the model is loaded.
    """
    try:
        file = reader.read(Path(path))
        longest = file.own("context_length", 0)
        trained = file.own("rope.scaling.original_context_length", longest)
    except (ConversionError, OSError):
        return 0, 0
    whole = isinstance(longest, int) and isinstance(trained, int)
    return (trained, longest) if whole and trained > 0 else (0, 0)
