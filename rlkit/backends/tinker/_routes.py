"""Routes of a loss to the service, and the data of each hosted call.

A hosted loss has neither a mask nor weights. Masked positions are sent with q = 0, A = 0 and weight 0, which adds
exactly nothing to the losses used here, and weights are folded into the advantages where the loss allows it. Tokens of
weight 0 are sent with q = 0 as well: the service would multiply a ratio that may have no bound by 0.

Losses that are sent to the service as a graph and run there, in one pass.

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

from rlkit._fallback import Outcome, try_path
from rlkit.backends.tinker import guard
from rlkit.errors import RlkitError
from rlkit.types import Datum

if TYPE_CHECKING:
    from tinker import ServiceClient
    from tinker.lib.public_interfaces.custom_loss import LossHandle

    from rlkit.losses.prepare import PreparedLoss
    from rlkit.losses.traceable import Traced

__all__ = ["HOSTED", "Graph", "Part", "ServerLossPolicy", "ServerLosses", "arrays", "plan", "without_weights"]

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
        self._graphs: dict[Hashable, Graph | None] = {}  # by function, settings and kinds of inputs
        self._handles: dict[Hashable, Handle | None] = {}  # by graph: one session takes each once

    def choose(self, prepared: PreparedLoss, data: Sequence[Datum]) -> Graph | str:
        """Return the graph that is sent for the loss, or why none is."""
        if not self._offered:
            return "the service does not run custom losses"
        if self._policy == "never":
            return "server_losses='never'"
        if prepared.level != "datum":
            return f"it needs a whole {prepared.level}, but the service calls a loss on one datum at a time"
        if prepared.driver != "logprobs":
            return "its targets may be -1, which is not a token"
        if self._policy == "own" and not _own(prepared.function):
            return "it is not a loss of rlkit and may do more than its graph shows; see server_losses="
        if _key(prepared, data) is None:
            return "its settings or its datums' inputs differ in kind"
        graph = self._graph(prepared, data)
        if graph is None:
            return "it cannot be traced, or its graph computes another function"
        return "the service refused it" if self._handles.get(graph.key, graph) is None else graph

    def start(self, graph: Graph) -> Handle:
        """Return the future of the handle of a graph that ``choose`` gave."""
        handle = self._handles.get(graph.key)
        if handle is None:
            handle = self._handles[graph.key] = self._service.create_custom_loss(graph.function, graph.ranks).future()
        return handle

    def refused(self, name: str, graph: Graph, error: BaseException) -> None:
        """Remember that the service did not take it: from now on the loss of that name runs here."""
        self._handles[graph.key] = None
        message = "the service does not run the loss %r, so it runs here, in two passes: %s"
        _log.warning(message, name, guard.redact(str(error)))

    def _graph(self, prepared: PreparedLoss, data: Sequence[Datum]) -> Graph | None:
        key = _key(prepared, data)
        if key not in self._graphs:
            while len(self._graphs) >= _KEPT:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = _traced(prepared, data)
        return self._graphs[key]


@attrs.frozen(eq=False)
class Graph:
    """A traced loss: the plain function, the rank of each of its parameters, and what tells it from others."""

    function: Traced
    ranks: Mapping[str, int]
    key: Hashable


def _traced(prepared: PreparedLoss, data: Sequence[Datum]) -> Graph | None:
    """Return the loss as a graph, if it can be traced and the graph is the same function."""
    from torch import fx

    from rlkit.losses.traceable import traceable

    made: list[Graph] = []

    def trial() -> Outcome:
        names, scalars = _inputs(prepared, data)
        function = traceable(prepared, inputs=names, scalars=scalars)
        used = [datum for datum in data if datum.mask.any()][:2]
        ranks = {"logprobs": 1, "mask": 1, **{name: used[0].inputs[name].ndim for name in names}}
        graph = fx.symbolic_trace(function)
        made.append(Graph(function, ranks, (graph.code, *ranks.items())))
        return Outcome(_same(function, graph, names, used), "its graph computes another function")

    if _own(prepared.function):
        path, slower = f"the loss {prepared.name!r} on the service", "it runs here, in two passes"
        works = try_path(path, trial, slower, refusals=(Exception,))
    else:
        try:
            works = bool(trial())
        except (RlkitError, ValueError, TypeError, KeyError, RuntimeError, NotImplementedError):  # what users write
            works = False
    return made[0] if works else None


def arrays(prepared: PreparedLoss, datum: Datum) -> dict[str, np.ndarray]:
    """Return the arrays that are sent for a datum's loss: the mask, and its inputs, () or [n] or [n, K]."""
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


def _own(function: Callable[..., object]) -> bool:
    from rlkit.losses import kl, registry

    parts = getattr(function, "__rlkit_parts__", None)
    if parts is not None:
        return all(_own(part) for part in parts)
    known = [*registry.values(), *kl.registry.values()]
    return any(function is x for x in known) and str(getattr(function, "__module__", "")).startswith("rlkit.")


def _same(function: Traced, graph: Traced, names: Sequence[str], data: Sequence[Datum]) -> bool:
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


Arrays: TypeAlias = Mapping[str, np.ndarray]
Settings: TypeAlias = Mapping[str, Any]


@attrs.frozen(eq=False)
class Part:
    """One hosted call.

    Attributes:
        loss: the service's name.
        config: its settings, always all of them: servers differ in their defaults.
        arrays: per datum the loss's inputs, float32 [n] each by the service's names; None where the datum is not sent.
    """

    loss: str
    config: Mapping[str, float]
    arrays: Sequence[Arrays | None]


def plan(name: str, settings: Settings, data: Sequence[Datum]) -> tuple[Sequence[Part], str]:
    """Return the hosted calls that together are exactly the loss ``name``; none, and the reason, where there are none.

    Args:
        name: of ``rlkit.losses.registry``.
        settings: of the loss, bound.
        data: the datums.
    """
    make = HOSTED.get(name)
    if make is None:
        return (), f"the service has no loss {name!r}"
    used = [datum if datum.mask.any() else None for datum in data]
    parts = make(settings, used)
    return (parts, "") if not isinstance(parts, str) else ((), parts)


def without_weights(part: Part) -> Part:
    """Return the same loss for a service whose cross entropy divides by the sum of the weights.

    With its ratio clipped to [1, 1] cispo is -sum A lp, whatever the logprobs of sampling are. Weights of 0 and 1 alone
    are a mask, which every service takes for what it is.
    """
    per_part = [arrays["weights"] for arrays in part.arrays if arrays is not None and "weights" in arrays]
    plain = all(weights.ndim == 1 and bool(np.isin(weights, (0.0, 1.0)).all()) for weights in per_part)
    if part.loss != "cross_entropy" or plain or any(weights.ndim != 1 for weights in per_part):
        return part

    bounds = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
    weights = [None if arrays is None else arrays["weights"] for arrays in part.arrays]
    return Part("cispo", bounds, [w if w is None else {"logprobs": np.zeros_like(w), "advantages": w} for w in weights])


def _input(datum: Datum, name: str, default: float | None = None) -> np.ndarray:
    """Return float32 [n]: an input of the policy's own tokens."""
    n = int(datum.mask.sum())
    array = datum.inputs[name] if default is None or name in datum.inputs else np.float32(default)
    array = np.asarray(array, np.float32)
    values: np.ndarray = np.full(n, array, np.float32) if array.ndim == 0 else array[datum.mask]
    return values


def _weights(datum: Datum) -> np.ndarray:
    return _input(datum, "weights", 1.0)


_POSITIVE = "its minimum requires weights >= 0"  # w min(a, b) is max(w a, w b) where w < 0


def _negative(data: Sequence[Datum | None]) -> bool:
    return any(datum is not None and bool((_weights(datum) < 0).any()) for datum in data)


def _each(data: Sequence[Datum | None], arrays: Callable[[Datum], Arrays | None]) -> list[Arrays | None]:
    return [None if datum is None else arrays(datum) for datum in data]


def _sent_parts(*parts: Part) -> list[Part]:
    """Return those in which a datum is sent."""
    return [part for part in parts if any(arrays is not None for arrays in part.arrays)]


def _weighted(data: Sequence[Datum | None], weights: Callable[[Datum], np.ndarray]) -> list[Part]:
    """Return cross_entropy with these weights: -sum w lp."""
    return [Part("cross_entropy", {}, _each(data, lambda d: {"weights": weights(d)}))]


def _ratio(
    loss: str,
    data: Sequence[Datum | None],
    config: Mapping[str, float],
    advantages: Callable[[Datum], np.ndarray],
    behaviour: str = "sampling_logprobs",
) -> list[Part]:
    def arrays(datum: Datum) -> Arrays:
        q = np.where(_weights(datum) != 0, _input(datum, behaviour), np.float32(0))
        return {"logprobs": q, "advantages": advantages(datum)}

    return [Part(loss, config, _each(data, arrays))]


def _folded(datum: Datum) -> np.ndarray:
    folded: np.ndarray = _weights(datum) * _input(datum, "advantages")
    return folded


def _clip(settings: Settings) -> dict[str, float]:
    return {key: float(settings[key]) for key in ("clip_low_threshold", "clip_high_threshold")}


def _ppo(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    if settings["dual_clip"] is not None:
        return "the hosted ppo has no dual clip"
    if _negative(data):
        return _POSITIVE
    return _ratio("ppo", data, _clip(settings), _folded)


def _cispo(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    if settings["unified_mask"]:
        return "the hosted cispo has no unified mask"
    return _ratio("cispo", data, _clip(settings), _folded)


def _decoupled_ppo(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    if _negative(data):
        return _POSITIVE
    cap = settings["behaviour_cap"]

    # b > 0 may move into the minimum: b min(r A, c A) = min(r b A, c b A). So it is ppo from the old policy, of b A.
    def advantages(datum: Datum) -> np.ndarray:
        distance = _input(datum, "old_logprobs") - _input(datum, "sampling_logprobs")
        behaviour = np.exp(np.where(_weights(datum) != 0, distance, np.float32(0)))
        capped: np.ndarray = behaviour if cap is None else np.minimum(behaviour, np.float32(cap))
        weighted: np.ndarray = _folded(datum) * capped
        return weighted

    return _ratio("ppo", data, _clip(settings), advantages, "old_logprobs")


def _gspo_token(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    if _negative(data):
        return _POSITIVE

    def arrays(datum: Datum) -> Arrays:
        folded = _folded(datum)
        q = _input(datum, "sampling_logprobs")  # whatever the weight: it is part of the sequence's ratio
        return {"logprobs": q, "advantages": folded, "sequence_ratio_mask": np.ones_like(folded)}

    return [Part("gspo", _clip(settings), _each(data, arrays))]


def _gspo(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    for datum in data:
        if datum is not None and np.ptp(_folded(datum)) > 0:
            return "the hosted gspo is the token form, another loss where advantages differ within a datum"
    return _gspo_token(settings, data)


def _topr(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    """Clip the ratio to [0, 1], but above the threshold it has no say. A token counts in one call."""
    threshold = np.float32(settings["threshold"])

    def positive(datum: Datum) -> Arrays | None:
        chosen = _input(datum, "advantages") > threshold
        return {"weights": np.where(chosen, _folded(datum), np.float32(0))} if chosen.any() else None

    def other(datum: Datum) -> Arrays | None:
        chosen = _input(datum, "advantages") <= threshold
        if not chosen.any():
            return None
        advantages = np.where(chosen, _folded(datum), np.float32(0))
        return {"logprobs": _input(datum, "sampling_logprobs"), "advantages": advantages}

    bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": 1.0}
    return _sent_parts(Part("cross_entropy", {}, _each(data, positive)), Part("cispo", bounds, _each(data, other)))


def _mix(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    """Send the expert's tokens as cross entropy with weights w mu, the policy's as ppo with A := w (1 - mu) A."""
    if settings["phi"]:
        return "its weights depend on the policy's probabilities"
    if settings["dual_clip"] is not None:
        return "the hosted ppo has no dual clip"
    if _negative(data):
        return _POSITIVE

    def expert(datum: Datum) -> Arrays | None:
        chosen = _input(datum, "expert") != 0
        weights = _weights(datum) * _input(datum, "mu", 0.1)
        return {"weights": np.where(chosen, weights, np.float32(0))} if chosen.any() else None

    def own(datum: Datum) -> Arrays | None:
        chosen = _input(datum, "expert") == 0
        if not chosen.any():
            return None
        zero = np.float32(0)
        mu = _input(datum, "mu", 0.1)
        advantages = np.where(chosen, _folded(datum) * (1 - mu), zero)
        counted = chosen & (_weights(datum) != 0) & (mu != 1)
        return {"logprobs": np.where(counted, _input(datum, "sampling_logprobs"), zero), "advantages": advantages}

    return _sent_parts(Part("cross_entropy", {}, _each(data, expert)), Part("ppo", _clip(settings), _each(data, own)))


HOSTED: Mapping[str, Callable[[Settings, Sequence[Datum | None]], list[Part] | str]] = {
    "cispo": _cispo,
    "cross_entropy": lambda _, data: _weighted(data, _weights),
    "decoupled_ppo": _decoupled_ppo,
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "importance_sampling": lambda _, data: _ratio("importance_sampling", data, {}, _folded),
    "luspo": _gspo,
    "mix": _mix,
    "opmd": lambda settings, data: _weighted(data, lambda d: _folded(d) * np.float32(1.0 / (1.0 + settings["tau"]))),
    "ppo": _ppo,
    "reinforce": lambda _, data: _weighted(data, _folded),
    "topr": _topr,
}
