"""From a session's tree to trajectories: which branches are trained, and how much each counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.gateway.tree import Branch, Node
from rlkit.trajectory import Turn

__all__ = ["Credit", "branch_weights", "check_credit", "node_weights", "turns"]

Credit: TypeAlias = Literal["every", "last"] | Callable[[Sequence[Branch]], Sequence[float]]


def check_credit(credit: object) -> None:
    """Raise ConfigError for what is no way to give credit."""
    if credit not in ("every", "last") and not callable(credit):
        expected = "'every', 'last', or a function from branches to weights"
        raise ConfigError("credit", f"got {_check.shown(credit)}", expected)


def branch_weights(branches: Sequence[Branch], credit: Credit) -> list[float]:
    """Return how much each branch counts, >= 0.

    Args:
        branches: of a session.
        credit: "every": 1 for each; "last": 1 for the one that ended last, 0 for all others; or a function that is
            given the branches and returns their weights.

    Raises:
        ConfigError: another number of weights, or one that is negative or not finite.
    """
    check_credit(credit)
    if credit == "every":
        return [1.0] * len(branches)
    if credit == "last" or not callable(credit):
        newest = max((branch.last.number for branch in branches), default=0)
        return [float(branch.last.number == newest) for branch in branches]
    weights = list(credit(branches))
    if len(weights) != len(branches):
        raise ConfigError("credit", f"gave {len(weights)} weights", f"{len(branches)}", "one per branch")
    return [_check.real(f"credit: weight {i}", weight, low=0.0) for i, weight in enumerate(weights)]


def node_weights(branches: Sequence[Branch], weights: Sequence[float]) -> dict[int, float]:
    """Return number of a node -> how much it counts: a turn of several branches as much as the largest of them."""
    heaviest: dict[int, float] = {}
    for branch, weight in zip(branches, weights, strict=True):
        for node in branch.nodes:
            heaviest[node.number] = max(weight, heaviest.get(node.number, 0.0))
    return heaviest


def turns(nodes: Sequence[Node], weights: Mapping[int, float], reward: float = 0.0) -> list[Turn]:
    """Return the nodes that count as turns; the last one has the reward."""
    counted = [node for node in nodes if weights[node.number] > 0]
    last = len(counted) - 1
    return [
        Turn(node.sample, reward if i == last else 0.0, weight=weights[node.number]) for i, node in enumerate(counted)
    ]
