"""The base model with its adapter, and the ranks that load it together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from rlkit.backends.local.distributed.settings import Processes
from rlkit.backends.local.model.base import Base, load_base
from rlkit.backends.local.model.lora import with_adapter
from rlkit.backends.local.model.untried import warn_untried
from rlkit.types import Lora

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.ranks import Ranks
    from rlkit.backends.local.distributed.sharding import ShardedWeights

__all__ = ["load_adapted", "start_ranks"]


def start_ranks(
    processes: Processes | None, options: Mapping[str, object], lora: Lora, place: torch.device, device: str | None
) -> Ranks:
    """Have other processes open the same backend; see ``Ranks``."""
    from rlkit.backends.local.distributed.ranks import Ranks

    assert processes is not None  # noqa: S101  # checked before
    return Ranks(processes, {**options, "lora": attrs.asdict(lora)}, place, device)


def load_adapted(
    model: tuple[str, str, torch.device],
    lora: Lora,
    seed: int,
    weights: ShardedWeights | None,
    ranks: Ranks | None,
    *,
    fresh: bool,
) -> tuple[Base, Any]:
    """Return the base and the peft model; where one cannot be made, the ranks are left that were to load it, too.

    Args:
        model: its name, dtype and device.
        lora, seed, fresh: of the adapter, see ``with_adapter``.
        weights: where the ranks' parts of the weights go.
        ranks: that were started for that.
    """
    try:
        base = load_base(*model, weights)
        warn_untried(base.device)
        return base, with_adapter(base, lora, seed, fresh=fresh)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise
