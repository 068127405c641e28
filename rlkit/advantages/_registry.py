"""The registry of estimators."""

from __future__ import annotations

from rlkit.registry import Registry

_LOSSES = ("ppo", "cispo", "gspo", "dpo", "cross_entropy", "importance_sampling")


def _elsewhere(name: str) -> str:
    known = name.lower() in _LOSSES
    return f"it is a loss; pass it to forward_backward(data, {name.lower()!r})" if known else ""


registry = Registry("estimator", entry_point_group="rlkit.advantages", elsewhere=_elsewhere)
register = registry.register
