"""Where a model's files are: see ``rlkit.backends.local.model.hub``."""

from __future__ import annotations

from rlkit.backends.local.model.hub import model_path

__all__ = ["model_path"]
