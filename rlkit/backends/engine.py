"""The seam between a trainer and what samples for it: vLLM behind HTTP, another process, another device."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from rlkit.backends.protocol import Sampler

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.backends.live import SuccessiveSampler
    from rlkit.futures import Future

__all__ = ["ADAPTER", "LiveEngine", "LoraAdapter", "SamplingEngine"]

ADAPTER = "adapter_model.safetensors"


@attrs.frozen(eq=False)
class LoraAdapter:
    """A LoRA in peft's own format, which vLLM, SGLang and transformers load.

    Attributes:
        tensors: on the CPU, "base_model.model.MODULE.lora_A.weight" [r, in] and "...lora_B.weight" [out, r].
        config: what stands in ``adapter_config.json``.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, object]

    def save(self, folder: str | Path) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json``, which peft's ``from_pretrained`` reads."""
        from safetensors.torch import save_file

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        save_file(dict(self.tensors), target / ADAPTER, metadata={"format": "pt"})
        text = json.dumps(dict(self.config), indent=2, sort_keys=True)
        (target / "adapter_config.json").write_text(text, "utf-8")


@runtime_checkable
class SamplingEngine(Protocol):
    """Samples what a trainer trains: ``rlkit.connect("local", sampler=engine)``.

    The trainer calls it from one thread, in the order of the user's calls: for ``policy.sampler()`` it asks for
    ``sampler(version)``; where that is None it calls ``load_adapter`` and asks again. Versions grow by 1 with every
    optimizer step. What the engine raises is raised by the future of ``policy.sampler()``, and training goes on.
    """

    def load_adapter(self, adapter: LoraAdapter, version: int) -> None:
        """Make the policy of ``version`` ready. The engine may keep the tensors; nobody else writes to them."""

    def sampler(self, version: int) -> Sampler | None:
        """Return a sampler of that version, or None where it is not loaded, or no longer.

        A sampler is a snapshot (rule R5): a version that is still sampled from stays loaded, also beside a later one.
        """

    def base_sampler(self) -> Sampler:
        """Return a sampler of the base model."""

    def close(self) -> None:
        """Free everything; called when the trainer is closed. Idempotent."""


@runtime_checkable
class LiveEngine(Protocol):
    """An engine whose running requests take a newer adapter."""

    def live_sampler(
        self, first: Sampler, update: Callable[[SuccessiveSampler], Future[int]]
    ) -> SuccessiveSampler | None:
        """Return a live sampler of these (see ``SuccessiveSampler``) whose ``switches`` is "token".

        None where that cannot be; then running requests end under the policy with which they began.
        """
