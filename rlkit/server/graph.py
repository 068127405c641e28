"""Custom losses: a traced graph as plain data, carried out from a list of allowed operations.

Nothing of the request is ever executed: a node names an operation, and what is called comes from the tables of
``rlkit.server.operations``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from rlkit.server.losses import Loss
from rlkit.server.operations import FUNCTIONS, LIMIT, METHODS, bounded
from rlkit.server.requests import ApiError, Fields

__all__ = ["Graph", "read_loss"]

_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_MAX_NODES = 1000

_CONSTANTS = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


@attrs.frozen
class _Node:
    op: str
    name: str
    target: str
    args: Any
    kwargs: Any


class Graph:
    """A custom loss: called with logprobs and its inputs, it returns (loss, metrics).

    Args:
        nodes: as they came, in order of execution.
        inputs: the names of the placeholders, "logprobs" first.

    Raises:
        ApiError: 400, naming the node that is not allowed or not understood.
    """

    def __init__(self, nodes: list[object], inputs: tuple[str, ...]) -> None:
        if not 1 <= len(nodes) <= _MAX_NODES:
            raise ApiError(400, f"create_custom_loss: the graph has {len(nodes)} nodes; expected 1 to {_MAX_NODES}")
        self._inputs = inputs
        self._nodes = [_read_node(i, node) for i, node in enumerate(nodes)]
        names = [node.name for node in self._nodes]
        placeholders = [node.target for node in self._nodes if node.op == "placeholder"]
        if len(set(names)) != len(names) or placeholders != list(inputs) or self._nodes[-1].op != "output":
            raise ApiError(
                400, f"create_custom_loss: expected the placeholders {list(inputs)} first and an output last"
            )

    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss and its metrics.

        Raises:
            ApiError: 400, a node could not be carried out, or what is returned is no loss.
        """
        values: dict[str, Any] = {}
        for node in self._nodes:
            try:
                args = _decoded(node.args, values)
                kwargs = {key: _decoded(arg, values) for key, arg in node.kwargs.items()}
                if node.op == "placeholder":
                    value = logprobs if node.target == "logprobs" else inputs[node.target]
                elif node.op == "output":
                    return _checked(args[0])
                else:
                    bounded([args, kwargs])
                    table = FUNCTIONS if node.op == "call_function" else METHODS
                    value = table[node.target](*args, **kwargs)
            except (ApiError, torch.cuda.OutOfMemoryError):
                raise
            except Exception as error:
                raise ApiError(400, f"custom loss: node {node.name!r} ({node.target}): {error}") from error
            if isinstance(value, torch.Tensor) and value.numel() > LIMIT:
                raise ApiError(400, f"custom loss: node {node.name!r} makes a tensor of {value.numel()} elements")
            values[node.name] = value
        raise AssertionError("the last node is the output")


def read_loss(fields: Fields) -> Loss:
    """Return the loss of a create_custom_loss request. Raises ApiError: 400 or 422, naming what is not allowed."""
    ranks: dict[str, int] = {}
    for i, item in enumerate(fields.items("inputs")):
        declared = Fields(f"create_custom_loss.inputs[{i}]", item if isinstance(item, dict) else {})
        ranks[declared.text("name")] = declared.integer("rank", low=0, high=2)
    if next(iter(ranks), None) != "logprobs" or ranks["logprobs"] == 0:
        raise ApiError(400, "create_custom_loss: the first input is logprobs, of rank 1 or 2")
    graph = fields.object("graph")
    if graph.integer("format") != 1:
        raise ApiError(400, f"create_custom_loss: graph.format is {graph.get('format')}; this server reads format 1")
    read = Graph(graph.items("nodes"), tuple(ranks))
    return Loss(f"custom {fields.text('name')}", read, matrix=True, elementwise=False, ranks=ranks)


def _read_node(i: int, item: Any) -> _Node:
    fields = Fields(f"create_custom_loss.graph.nodes[{i}]", item if isinstance(item, dict) else {})
    node = _Node(
        fields.text("op"),
        fields.text("name"),
        fields.text("target"),
        fields.items("args", []),
        fields.object("kwargs", Fields("", {})).values,
    )
    allowed = {"placeholder": None, "output": None, "call_function": FUNCTIONS, "call_method": METHODS}
    if node.op not in allowed:
        raise ApiError(400, f"{fields.where}: {node.op} is not allowed; a custom loss calls functions and methods only")
    table = allowed[node.op]
    if table is not None and node.target not in table:
        raise ApiError(400, f"{fields.where}: {node.op} of {node.target!r} is not allowed by this server")
    return node


def _decoded(value: Any, values: Mapping[str, object]) -> Any:
    """Decode an argument: JSON scalars stand for themselves, an object with one key for what JSON lacks."""
    if isinstance(value, list):
        return [_decoded(x, values) for x in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"an argument has {len(value)} keys; expected one")
    kind, inner = next(iter(value.items()))
    if kind == "ref":
        return values[inner]
    if kind == "tuple":
        return tuple(_decoded(x, values) for x in inner)
    if kind == "dict":
        return {key: _decoded(x, values) for key, x in inner.items()}
    if kind == "slice":
        return slice(*(_decoded(x, values) for x in inner))
    if kind == "ellipsis":
        return Ellipsis
    if kind == "float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if kind == "device" and inner == "cpu":
        return torch.device("cpu")
    constant = getattr(torch, str(inner), None) if kind in _CONSTANTS else None
    if constant is None or not isinstance(constant, _CONSTANTS[kind]):
        raise ValueError(f"an argument {{{kind!r}: {inner!r}}} is not understood")
    return constant


def _checked(returned: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    good = isinstance(returned, (tuple, list)) and len(returned) == 2 and isinstance(returned[1], dict)
    if not good or not isinstance(returned[0], torch.Tensor) or returned[0].ndim != 0:
        raise ApiError(400, "custom loss: expected (a scalar tensor, a dict of metrics) to be returned")
    loss, metrics = returned
    for key, value in metrics.items():
        if not _METRIC.fullmatch(key) or not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ApiError(400, f"custom loss: the metric {key!r}: expected a scalar named custom/<name>:sum or :mean")
    return loss, {key: float(value.detach()) for key, value in metrics.items()}
