"""Credit assignment: from groups of episodes to the datums that train the policy."""

from __future__ import annotations

from rlkit.credit.assign import assign
from rlkit.credit.batch import Batch, Item, minibatches, weigh

__all__ = ["Batch", "Item", "assign", "minibatches", "weigh"]

for _public in (Batch, Item, assign, minibatches, weigh):
    _public.__module__ = __name__  # where users import them from
