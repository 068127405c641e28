"""Custom losses: a traced graph as plain data, rebuilt from a list of allowed operations."""

from __future__ import annotations

from rlkit.server.losses import Loss
from rlkit.server.requests import ApiError, Fields

__all__ = ["read_loss"]


def read_loss(fields: Fields) -> Loss:
    """The loss of a create_custom_loss request."""
    raise ApiError(400, f"{fields.where}: this server runs no custom losses")
