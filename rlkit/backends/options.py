"""The options of each backend, for type checkers and editors; what they mean stands at the backends themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from rlkit.backends.engine import SamplingEngine
from rlkit.types import Lora

if TYPE_CHECKING:
    from tinker import ServiceClient
    from tinker.types import OptimizerConfig
    from transformers import PreTrainedTokenizerBase

    from rlkit.backends.local.distributed.settings import Processes
    from rlkit.backends.protocol import Tokenizer
    from rlkit.backends.vllm.settings import Vllm

__all__ = ["LocalOptions", "Options", "TinkerOptions", "ToyOptions"]


class Options(TypedDict, total=False):
    """What every backend takes."""

    model: str | None
    lora: Lora | None
    seed: int | None
    folder: str | Path | None
    resume_from: str | None
    init_from: str | None


class ToyOptions(Options, total=False):
    """See ``rlkit.backends.toy.ToyBackend``."""

    max_length: int | None


class LocalOptions(Options, total=False):
    """See ``rlkit.backends.local.LocalBackend``."""

    dtype: str | None
    device: str | None
    merge: bool | Literal["auto"]
    micro_batch_tokens: int | None
    offload_folder: str | Path | None
    max_rows: int | None
    prefix_mb: int
    cuda_graphs: bool | None
    sampler: SamplingEngine | Vllm | str | Sequence[str] | None
    processes: int | Processes | None
    shard: bool


class TinkerOptions(Options, total=False):
    """See ``rlkit.backends.tinker.TinkerBackend``."""

    base_url: str | None
    api_key: str | None
    project: str | None
    client: ServiceClient | None
    tokenizer: str | Path | Tokenizer | PreTrainedTokenizerBase | None
    max_length: int | None
    deadline: float
    off_temperature: Literal["raise", "rescore", "keep"]
    server_losses: Literal["own", "all", "never"]
    ttl: int | None
    metadata: Mapping[str, str] | None
    resend: bool | None
    optimizer: OptimizerConfig | None
