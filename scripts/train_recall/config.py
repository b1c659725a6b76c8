"""Constants, the model shapes and their training schedules."""

from __future__ import annotations

from dataclasses import dataclass

Stages = list[tuple[float, tuple[int, ...]]]

TOKENS = 131072  # tokens per optimizer step, at every sequence length
MAX_POS = 131072  # trained position range
CHUNK = 64  # delta-net chunk: every sequence length is a multiple of it

VOCAB = 4096
EOT, IM_START, IM_END, MASK = 4092, 4093, 4094, 4095


@dataclass(frozen=True, slots=True)
class Config:
    """One model's shape; stored in its checkpoint."""

    arch: str = "qwen3"
    vocab: int = VOCAB
    n_layer: int = 6
    d: int = 256
    n_head: int = 4
    n_kv: int = 2
    d_head: int = 64
    n_rot: int = 64
    ffn: int = 768
    tied: bool = False
    rope_theta: float = 1e7
    eps: float = 1e-6
    full_interval: int = 4  # qwen35: layer i is attention if (i + 1) % full_interval == 0
    lin_heads: int = 4  # qwen35: delta-net heads (keys == values)
    lin_dim: int = 64
    conv: int = 4
    block: int = 16  # dflash
    chain: int = 0  # mtp, eagle3: tokens drafted one after another in training
    target_layers: tuple[int, ...] = ()  # dflash, eagle3: layer inputs of the target

    @property
    def blocks(self) -> range:
        """The numbers of its layers; an MTP head is the one after those of its target."""
        return range(self.n_layer, self.n_layer + 1) if self.arch == "mtp" else range(self.n_layer)

    @property
    def gated(self) -> bool:
        """Whether attention has an output gate, and the second norm qwen35's name."""
        return self.arch in ("qwen35", "mtp")

    def is_attn(self, i: int) -> bool:
        return self.arch != "qwen35" or (i + 1) % self.full_interval == 0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line decides about a run."""

    out: str
    device: str = "cuda"
    lr: float = 3e-3
    warm: int = 80  # steps
    hold: float = 0.55  # share of the time before the learning rate decays
    seed: int = 1
    compile: bool = True
    tokens: int = TOKENS
    stages: Stages | None = None  # None: STAGES of the model
    dflash_seq: int = 4096
    dflash_anchors: int = 32  # drafted blocks per sequence
    chain_anchors: int = 256  # drafted chains per sequence
    trials: int = 16  # needles per length and depth


CONFIGS = {
    "qwen3": Config(),
    "scorer": Config(n_layer=3, d=192, n_head=3, n_kv=1, ffn=576, tied=True),
    "qwen35": Config(arch="qwen35", n_layer=8, ffn=640, tied=True, n_rot=16),
    "dflash": Config(arch="dflash", n_layer=2, target_layers=(2, 4, 5)),
    "eagle3": Config(arch="eagle3", n_layer=1, ffn=512, chain=5, target_layers=(2, 4, 5)),
    "mtp": Config(arch="mtp", n_layer=8, ffn=640, n_rot=16, chain=4),
}
TARGETS = {"dflash": "qwen3", "eagle3": "qwen3", "mtp": "qwen35"}


#            until   lengths drawn with equal probability
STAGES: dict[str, Stages] = {
    "qwen3": [
        (0.20, (1024,)),
        (0.40, (4096, 4096, 1024)),
        (0.66, (16384, 16384, 4096, 2048)),
        (0.84, (32768, 32768, 8192, 2048)),
        (0.95, (65536, 16384, 4096)),
        (1.0, (131072, 32768, 8192)),
    ],
    "dflash": [(1.0, (4096,))],
}
STAGES["scorer"] = STAGES["qwen3"]
STAGES["qwen35"] = [
    (0.20, (1024,)),
    (0.42, (4096, 4096, 1024)),
    (0.68, (16384, 16384, 4096, 2048)),
    (0.88, (32768, 32768, 8192, 2048)),
    (1.0, (65536, 131072, 32768, 8192)),
]
