"""The keywords of `Llama`, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from llama_cpp.llama_speculative import LlamaDraftModel
    from llama_cpp.llama_tokenizer import BaseLlamaTokenizer

    from ..config import Fit, KVFlashConfig, PrefixCache, SpecConfig
    from ..logs import Progress
    from ..policy.base import Scorer


class PoolKeywords(TypedDict, total=False):
    """What this package adds. `Llama` says what each of them means."""

    kvflash: KVFlashConfig | int | str | None
    kvflash_policy: str | Scorer | None
    kvflash_scorer: str | Path | None
    kvflash_tau: int | None
    kvflash_calibrate: bool | str | Path | None
    kvflash_index: int | None
    kvflash_deterministic: bool | None
    kvflash_reading: Literal["auto", "exact", "pool", "preview"] | None
    kvflash_preview_share: float | None
    kvflash_stage: int | None
    kvflash_answer: Literal["pool", "exact", "lossless", "auto"] | None
    kvflash_spec: SpecConfig | str | None
    kvflash_pins: Sequence[tuple[int, int]] | None
    kvflash_spill: str | Path | None
    kvflash_host_limit: int | Literal["auto"] | None
    kvflash_cache: PrefixCache | str | Path | None
    kvflash_progress: Progress | None


class RemoteKeywords(TypedDict, total=False):
    """Devices of other machines, which this package adds too. rpc_servers: as upstream's server names them."""

    rpc: str | Sequence[str] | None
    rpc_servers: str | None
    rpc_trust: bool | None


class DeviceKeywords(TypedDict, total=False):
    """Where the model goes: what upstream's structs can say and its constructor cannot."""

    device: Sequence[str] | str | None
    override_tensor: Sequence[tuple[str, str]] | str | None
    n_cpu_moe: int | None
    fit: bool | Fit | None


class WeightKeywords(TypedDict, total=False):
    """What llama.cpp can be asked about weights, and upstream's constructor cannot. `Llama` says what each means."""

    use_extra_bufts: bool


class MediaKeywords(TypedDict, total=False):
    """What of a model lies in a file beside it, and upstream opens in a chat handler."""

    mmproj: str | Path | None


class UpstreamKeywords(TypedDict, total=False):
    """What llama_cpp.Llama takes. A test compares the names with its signature."""

    n_gpu_layers: int
    split_mode: int
    main_gpu: int
    tensor_split: list[float] | None
    vocab_only: bool
    use_mmap: bool
    use_mlock: bool
    kv_overrides: dict[str, bool | int | float | str] | None
    seed: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int | None
    n_threads_batch: int | None
    rope_scaling_type: int | None
    pooling_type: int
    attention_type: int
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    logits_all: bool
    embedding: bool
    offload_kqv: bool
    flash_attn: bool
    op_offload: bool | None
    swa_full: bool | None
    no_perf: bool
    last_n_tokens_size: int
    lora_base: str | None
    lora_scale: float
    lora_path: str | None
    numa: bool | int
    chat_format: str | None
    chat_handler: Any
    draft_model: LlamaDraftModel | str | Path | None
    tokenizer: BaseLlamaTokenizer | None
    type_k: int | None
    type_v: int | None
    spm_infill: bool
    verbose: bool


class Keywords(
    PoolKeywords, DeviceKeywords, RemoteKeywords, WeightKeywords, MediaKeywords, UpstreamKeywords, total=False
):
    """Everything the constructor takes by keyword."""
