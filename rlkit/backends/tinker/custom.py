"""Losses that are sent to the service as a graph and run there, in one pass.

Only losses of rlkit's own take this way by themselves: those of the registry, and compositions of them. A function of
the user's may do more than its graph shows (count, print, draw), so it runs here unless told otherwise.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import numpy as np

from rlkit.backends.tinker import secrets
from rlkit.errors import RlkitError
from rlkit.types import Datum

if TYPE_CHECKING:
    from tinker import ServiceClient
    from tinker.lib.public_interfaces.custom_loss import LossHandle

    from rlkit.losses.prepare import PreparedLoss

__all__ = ["ServerLossPolicy", "ServerLosses", "arrays"]

ServerLossPolicy: TypeAlias = Literal["own", "all", "never"]
Handle: TypeAlias = "concurrent.futures.Future[LossHandle]"
_log = logging.getLogger("rlkit.tinker")
_KEPT = 64  # handles that are remembered


class ServerLosses:
    """The losses that a session has sent.

    Args:
        policy: which losses may be sent: rlkit's "own", "all" that can be traced, or "never" one.
    """

    def __init__(self, service: ServiceClient, policy: ServerLossPolicy, *, offered: bool) -> None:
        self._service = service
        self._policy = policy
        self._offered = offered
        self._graphs: dict[Hashable, _Graph | None] = {}  # by function, settings and kinds of inputs
        self._handles: dict[Hashable, Handle | None] = {}  # by graph: one session takes each once

    def refusal(self, prepared: PreparedLoss, data: Sequence[Datum]) -> str:
        """Return why the loss is not sent, "" when it is."""
        if not self._offered:
            return "the service does not run losses that are sent to it"
        if self._policy == "never":
            return "server_losses='never'"
        if prepared.level != "datum":
            return f"it looks at a {prepared.level}, and the service calls a loss on one datum at a time"
        if prepared.driver != "logprobs":
            return "its targets may be -1, which no token is"
        if self._policy == "own" and not _own(prepared.function):
            return "it is not one of rlkit's own and may do more than its graph shows; see server_losses="
        if _key(prepared, data) is None:
            return "its settings or its datums' inputs differ in kind"
        graph = self._graph(prepared, data)
        if graph is None:
            return "it cannot be traced, or its graph is not the same function"
        return "the service did not take it" if self._handles.get(graph.key, graph) is None else ""

    def start(self, prepared: PreparedLoss, data: Sequence[Datum]) -> Handle | None:
        """Return the handle's future; None where ``refusal`` has a reason."""
        if self.refusal(prepared, data):
            return None
        graph = self._graph(prepared, data)
        if graph is None:
            return None
        if graph.key not in self._handles:
            self._handles[graph.key] = self._service.create_custom_loss(graph.function, graph.ranks).future()
        return self._handles[graph.key]

    def refused(self, prepared: PreparedLoss, data: Sequence[Datum], error: BaseException) -> None:
        """Remember that the service did not take it: from now on it runs here."""
        graph = self._graph(prepared, data)
        if graph is not None:
            self._handles[graph.key] = None
        message = "the service does not run the loss %r, so it runs here, in two passes: %s"
        _log.warning(message, prepared.name, secrets.redact(str(error)))

    def _graph(self, prepared: PreparedLoss, data: Sequence[Datum]) -> _Graph | None:
        key = _key(prepared, data)
        if key not in self._graphs:
            while len(self._graphs) >= _KEPT:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = _traced(prepared, data)
        return self._graphs[key]


@attrs.frozen(eq=False)
class _Graph:
    """A traced loss: the plain function, the rank of each of its parameters, and what tells it from others."""

    function: Callable[..., Any]
    ranks: Mapping[str, int]
    key: Hashable


def _traced(prepared: PreparedLoss, data: Sequence[Datum]) -> _Graph | None:
    """Return the loss as a graph, if it can be traced and the graph is the same function."""
    from torch import fx

    from rlkit.losses.traceable import traceable

    names, scalars = _inputs(prepared, data)
    try:
        function = traceable(prepared, inputs=names, scalars=scalars)
        used = [datum for datum in data if datum.mask.any()][:2]
        ranks = {"logprobs": 1, "mask": 1, **{name: used[0].inputs[name].ndim for name in names}}
        graph = fx.symbolic_trace(function)
        if not _same(function, graph, names, used):
            return None
    except (RlkitError, ValueError, TypeError, KeyError, RuntimeError, NotImplementedError):
        return None
    return _Graph(function, ranks, (graph.code, *ranks.items()))


def arrays(prepared: PreparedLoss, datum: Datum) -> dict[str, np.ndarray]:
    """Return what a datum's loss is sent: the mask, and its inputs, () or [n] or [n, K]."""
    sent = {"mask": np.ones(int(datum.mask.sum()), np.float32)}
    for name in _sent(prepared, datum.inputs):
        array = datum.inputs[name]
        sent[name] = array if array.ndim == 0 else array[datum.mask]
    return sent


def _sent(prepared: PreparedLoss, names: Iterable[str]) -> list[str]:
    return [*prepared.inputs, *(name for name in prepared.optional if name in names)]


def _inputs(prepared: PreparedLoss, data: Sequence[Datum]) -> tuple[list[str], list[str]]:
    """Return the names of the inputs that the datums have, and of those that are one number each."""
    first = next(datum for datum in data if datum.mask.any())
    names = _sent(prepared, first.inputs)
    return names, [name for name in names if first.inputs[name].ndim == 0]


def _key(prepared: PreparedLoss, data: Sequence[Datum]) -> Hashable:
    """Return what tells graphs apart; None where the datums of one call would need several."""
    kinds = {
        tuple((name, d.inputs[name].ndim, d.inputs[name].dtype.kind) for name in _sent(prepared, d.inputs))
        for d in data
        if d.mask.any()
    }
    key = (prepared.function, tuple(sorted(prepared.settings.items())), *kinds)
    try:
        hash(key)
    except TypeError:
        return None
    return key if len(kinds) == 1 else None


def _own(function: Callable[..., Any]) -> bool:
    from rlkit.losses import kl, registry

    parts = getattr(function, "__rlkit_parts__", None)
    if parts is not None:
        return all(_own(part) for part in parts)
    known = [*registry.values(), *kl.registry.values()]
    return any(function is x for x in known) and str(getattr(function, "__module__", "")).startswith("rlkit.")


def _same(function: Callable[..., Any], graph: Callable[..., Any], names: Sequence[str], data: Sequence[Datum]) -> bool:
    """Return whether the graph has the function's value and gradient, on made-up logprobs and with NaN elsewhere."""
    import torch

    generator = np.random.default_rng(0)
    for datum in data:
        made = -generator.exponential(size=len(datum)).astype(np.float32)
        arguments = [torch.tensor(_hidden(datum.inputs[name], datum.mask)) for name in names]
        mask = torch.tensor(datum.mask.astype(np.float32))
        results = []
        for call in (function, graph):
            leaf = torch.tensor(np.where(datum.mask, made, np.float32(np.nan))).requires_grad_()
            value = call(leaf, mask, *arguments)[0]
            results.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
        (value, gradient), (other, others) = results
        if not (torch.allclose(value, other, rtol=1e-6) and torch.allclose(gradient, others, rtol=1e-5, atol=1e-7)):
            return False
    return True


def _hidden(array: np.ndarray, mask: np.ndarray) -> np.ndarray:
    if array.ndim == 0 or array.dtype.kind == "i":
        return np.array(array)
    hidden = np.array(array)
    hidden[~mask] = np.nan
    return hidden
