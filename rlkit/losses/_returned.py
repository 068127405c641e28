"""What a loss returned: a scalar, and metrics if it likes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    import torch
else:
    from rlkit._lazy import torch

__all__ = ["returned"]

_RESERVED = ("loss:sum", "tokens:sum", "datums:sum")


def returned(name: str, result: object) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the scalar, and the metrics under names that say how they are added up.

    Raises:
        ConfigError: it returned something else.
    """
    value, reported = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(value, torch.Tensor) or value.ndim != 0:
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else _check.shown(value)
        raise ConfigError(
            _check.problem(f"the loss {name!r}", f"returned {shape}", "a scalar tensor, or (it, metrics)", "sum it")
        )
    if not isinstance(reported, Mapping):
        raise ConfigError(_check.problem(f"the loss {name!r}", f"returned metrics {_check.shown(reported)}", "a dict"))
    metrics = {}
    for key, number in reported.items():
        if not isinstance(key, str) or key in _RESERVED:
            expected = f"names of its own; {', '.join(_RESERVED)} are the backend's"
            raise ConfigError(_check.problem(f"the loss {name!r}", f"returned the metric {key!r}", expected))
        suffixed = key if key.endswith((":sum", ":mean")) else f"{key}:mean"
        metrics[suffixed] = float(number.detach() if isinstance(number, torch.Tensor) else number)
    return value, metrics
