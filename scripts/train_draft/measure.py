"""What a drafter wins on greedy answers to the prompts that are held out, and what its steps cost.

  python -m scripts.train_draft.measure MODEL.gguf DRAFTER.gguf PROMPTS.npz

Needs the package and no torch. Each arm is a model of its own in one process; they answer in turns: without drafts,
with the controller deciding, and with widths that are always verified.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import numpy as np

from kvflash_ggml import Llama, SpecConfig

WIDTHS = (2, 3, 4, 8)


@dataclass(slots=True)
class Arm:
    """tokens, seconds: of all answers behind their first token. same: how many are the plain ones. agreed: drafted
    tokens that were right, by place."""

    name: str
    llm: Llama
    tokens: int = 0
    seconds: float = 0.0
    same: int = 0
    steps: int = 0
    accepted: int = 0
    agreed: list[int] = field(default_factory=list)

    def answer(self, prompt: list[int], most: int) -> list[int]:
        """The greedy answer, counted."""
        out, start = list[int](), 0.0
        for token in self.llm.generate(prompt, temp=0.0):
            start = start or time.perf_counter()
            out.append(int(token))
            if len(out) >= most or token == self.llm.token_eos():
                break
        self.tokens += len(out) - 1
        self.seconds += time.perf_counter() - start
        if self.llm.kvflash.spec is not None:
            last = self.llm.kvflash.spec.last
            self.steps, self.accepted = self.steps + last.steps, self.accepted + last.accepted
            self.agreed += [0] * (len(last.agreed) - len(self.agreed))
            for place, count in enumerate(last.agreed):
                self.agreed[place] += count
        return out

    def line(self, plain: Arm, prompts: int) -> str:
        """What came of it."""
        rate = self.tokens / self.seconds
        words = f"{self.name:11} {rate:7.1f} tok/s, {rate * plain.seconds / plain.tokens:.2f} of plain"
        words += f", same text {self.same} of {prompts}"
        if self.steps:
            places = " ".join(f"{100 * x / self.steps:.0f}" for x in self.agreed if x)
            words += f"; {1 + self.accepted / self.steps:.2f} a step that verified ({self.steps}), by place {places} %"
        return words


def main() -> None:
    """The command line."""
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    ap.add_argument("model")
    ap.add_argument("drafter")
    ap.add_argument("prompts", help="of scripts.train_draft.prompts")
    ap.add_argument("--count", type=int, default=12, help="prompts")
    ap.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    ap.add_argument("-ngl", "--n-gpu-layers", type=int, default=0)
    ap.add_argument("-t", "--threads", type=int, default=2)
    args = ap.parse_args()
    data = np.load(args.prompts)
    lengths = data["held_out_length"][: args.count]
    prompts = [row[:n].tolist() for row, n in zip(data["held_out"], lengths, strict=False)]

    def opened(spec: SpecConfig | None) -> Llama:
        return Llama(
            args.model, n_ctx=1024, n_threads=args.threads, n_gpu_layers=args.n_gpu_layers, kvflash=1024,
            kvflash_spec=spec, verbose=False,
        )  # fmt: skip

    def drafting(width: int | None = None) -> SpecConfig:
        return SpecConfig(types=("draft-dflash",), draft=args.drafter, width=width)

    plain = Arm("plain", opened(None))
    arms = [plain, Arm("controller", opened(drafting()))]
    arms += [Arm(f"width {width}", opened(drafting(width))) for width in WIDTHS]
    for arm in arms:
        for _ in zip(range(args.tokens), arm.llm.generate(prompts[0], temp=0.0), strict=False):
            pass  # everything is made, and what costs what is found out, in the first answer
    for prompt in prompts:
        wanted = plain.answer(prompt, args.tokens)
        plain.same += 1
        for arm in arms[1:]:
            arm.same += arm.answer(prompt, args.tokens) == wanted
    for arm in arms:
        print(arm.line(plain, len(prompts)), flush=True)


if __name__ == "__main__":
    main()
