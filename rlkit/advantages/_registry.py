"""The registry of estimators."""

from __future__ import annotations

from rlkit.registry import Registry

registry = Registry("estimator", entry_point_group="rlkit.advantages")
register = registry.register
