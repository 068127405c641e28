"""How a loss reaches the service: hosted losses alone or added up, or the SDK's own pass for a loss that runs here.

A hosted loss has neither a mask nor weights. Masked positions are sent with q = 0, A = 0 and weight 0, which adds
exactly nothing to the losses used here, and weights are folded into the advantages where the loss allows it. Tokens of
weight 0 are sent with q = 0 as well: the service would multiply a ratio that may have no bound by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np

from rlkit.backends.protocol import Route
from rlkit.backends.tinker._failures import LossFailed
from rlkit.backends.trainer import PendingResult, assemble_output
from rlkit.errors import BackendError
from rlkit.metrics import names
from rlkit.types import Datum
from rlkit.types import ForwardBackwardOutput as Output

if TYPE_CHECKING:
    import torch
    from tinker import TrainingClient, types

    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = ["HOSTED", "HostedCall", "NotHosted", "find_route", "send"]

Arrays: TypeAlias = Mapping[str, np.ndarray]
Settings: TypeAlias = Mapping[str, Any]
OfDatum: TypeAlias = Callable[[Datum], np.ndarray]
Plan: TypeAlias = "Sequence[tuple[HostedCall, Mapping[int, Arrays]]]"


def find_route(data: Sequence[Datum], prepared: PreparedLoss) -> Route:
    """Return the way that these datums take; send nothing."""
    calls, why = _plan(data, prepared)
    if calls:
        return Route("hosted" if len(calls) == 1 else "composed", tuple(call.loss for call, _ in calls))
    return Route("client", ("forward", "cross_entropy"), why)


def send(
    client: TrainingClient, data: Sequence[Datum], prepared: PreparedLoss | None, *, backward: bool
) -> PendingResult[Output]:
    """Ask for logprobs, where the value of the loss is taken here, or send its gradient by the cheapest exact way."""
    indices = _find_trained(data)
    if not indices:
        return PendingResult([], lambda _: _assemble(data, {}))
    calls = _plan(data, prepared)[0] if backward and prepared is not None else ()
    if calls:
        return _send_hosted(client, data, calls)
    return _send_scored(client, data, indices, prepared, backward=backward)


def _plan(data: Sequence[Datum], prepared: PreparedLoss) -> tuple[Plan, str]:
    """Return the hosted calls that together are exactly the loss, with the arrays of the datums that each has.

    Where there are none, the text says why.
    """
    if not prepared.named:
        return (), "it is given as a function, which runs in this process as written"
    if prepared.name not in HOSTED:
        return (), f"the service has no loss {prepared.name!r}"
    used = {i: data[i] for i in _find_trained(data)}
    try:
        calls = HOSTED[prepared.name](prepared.settings, list(used.values()))
    except NotHosted as error:
        return (), str(error)
    plan = []
    for call in calls:
        arrays = {i: inputs for i, datum in used.items() if (inputs := call.read(datum)) is not None}
        if arrays or not used:
            plan.append((call, arrays))
    return plan, ""


def _send_hosted(client: TrainingClient, data: Sequence[Datum], calls: Plan) -> PendingResult[Output]:
    sent = []
    for call, arrays in calls:
        datums = [_to_sdk_datum(data[i], inputs) for i, inputs in arrays.items()]
        sent.append(client.forward_backward(datums, call.loss, dict(call.config) or None).future())

    def finish(results: list[types.ForwardBackwardOutput]) -> Output:
        logprobs: dict[int, np.ndarray] = {}
        metrics = {"loss:sum": 0.0}
        for response, (_, arrays) in zip(results, calls, strict=True):
            rows = _read_logprobs("forward_backward", _rows(response), data, [*arrays])
            logprobs.update(zip(arrays, rows, strict=True))
            names.add(metrics, _read_metrics(response), len(arrays))
        # A mean is over the datums that were sent, as on other backends; several calls may have sent the same ones.
        averaged = names.averaged(metrics, sum(len(arrays) for _, arrays in calls))
        return _assemble(data, logprobs, metrics=averaged)

    return PendingResult(sent, finish)


def _read_metrics(response: types.ForwardBackwardOutput) -> dict[str, float]:
    metrics = {key: float(x) for key, x in (response.metrics or {}).items() if key == names.with_ending(key)}
    if not np.isfinite(metrics.get("loss:sum", np.nan)):  # the service may measure what has no value; a loss may not
        raise BackendError(f"forward_backward: the service's loss is {metrics.get('loss:sum')}")
    return metrics


def _send_scored(
    client: TrainingClient,
    data: Sequence[Datum],
    indices: Sequence[int],
    prepared: PreparedLoss | None,
    *,
    backward: bool,
) -> PendingResult[Output]:
    """Ask for logprobs, and evaluate the loss here.

    With ``backward`` the SDK then sends the loss's gradient as the weights of a cross entropy, which is exact for any
    loss of the logprobs.
    """
    call = "forward_backward" if backward else "forward"
    used = [data[i] for i in indices]
    found: list[tuple[LossGradient | None, list[np.ndarray]]] = []

    def evaluate(rows: Sequence[np.ndarray]) -> LossGradient | None:
        found.append(_differentiate(prepared, _read_logprobs(call, rows, data, indices), used, indices))
        return found[0][0]

    def loss(_: object, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """Return a value with the loss's gradient."""
        gradient = evaluate([x.detach().numpy() for x in logprobs])
        assert gradient is not None  # noqa: S101  # there is a loss
        terms = []
        for datum, x, part in zip(used, logprobs, gradient.driver, strict=True):
            own = x[np.flatnonzero(datum.mask) - 1]
            if part.ndim == 2:  # the last column has the datum's own tokens
                own, part = own[:, :-1], part * part.new_tensor(_find_real(datum))
            terms.append((own * part).sum())
        return sum(terms, start=logprobs[0].new_zeros(())), {}

    def finish(results: list[types.ForwardBackwardOutput]) -> Output:
        if not backward:
            evaluate(_rows(results[0]))
        gradient, logprobs = found[0]
        return _assemble(data, dict(zip(indices, logprobs, strict=True)), parts=[gradient])

    datums = [_scored_datum(datum, prepared) for datum in used]
    if backward:
        return PendingResult([client.forward_backward_custom(datums, loss).future()], finish)
    return PendingResult([client.forward(datums, "cross_entropy").future()], finish)


def _differentiate(
    prepared: PreparedLoss | None, rows: list[np.ndarray], used: Sequence[Datum], indices: Sequence[int]
) -> tuple[LossGradient | None, list[np.ndarray]]:
    """Return the gradient of a loss by what ``_read_logprobs`` gave, and the logprobs of the datums' own tokens.

    Raises:
        LossFailed: whatever the loss raised.
    """
    if prepared is None:
        return None, rows
    import torch

    driver = own = rows
    if prepared.driver == "target_logprobs":
        driver = [np.where(_find_real(d), x[:, :-1], np.float32(0)) for d, x in zip(used, rows, strict=True)]
        own = [x[:, -1] for x in rows]
    try:
        return prepared.gradient([torch.from_numpy(x) for x in driver], used, places=indices), own
    except BaseException as error:
        raise LossFailed(error) from error


def _find_trained(data: Sequence[Datum]) -> list[int]:
    """Return which datums are sent: those with a token of the policy's own."""
    return [i for i, datum in enumerate(data) if datum.mask.any()]


def _assemble(data: Sequence[Datum], logprobs: Mapping[int, np.ndarray], **more: Any) -> Output:
    """Return the call's output from the logprobs of the datums that were sent."""
    none = [np.zeros(int(datum.mask.sum()), np.float32) for datum in data]
    return assemble_output(data, [logprobs.get(i, zeros) for i, zeros in enumerate(none)], {}, **more)


def _find_real(datum: Datum) -> np.ndarray:
    """Return which targets [n, K] are tokens; the others, -1, are sent as 0 and count nothing."""
    targets: np.ndarray = datum.inputs["target_tokens"][datum.mask]
    return targets >= 0


def _scored_datum(datum: Datum, prepared: PreparedLoss | None) -> types.Datum:
    """Return the SDK's datum whose logprobs are asked for: with targets these, 0 for none, and last its own tokens."""
    if prepared is None or prepared.driver != "target_logprobs":
        return _to_sdk_datum(datum, {"weights": np.zeros(int(datum.mask.sum()), np.float32)})
    targets = np.maximum(datum.inputs["target_tokens"][datum.mask], 0)
    targets = np.column_stack([targets, datum.tokens[datum.mask]])
    return _to_sdk_datum(datum, {"weights": np.zeros(targets.shape, np.float32)}, targets)


def _to_sdk_datum(datum: Datum, arrays: Mapping[str, np.ndarray], targets: np.ndarray | None = None) -> types.Datum:
    """Return the SDK's datum.

    What follows the last token of the policy's own has no influence and is left out.

    Args:
        datum: with at least one token of the policy's own.
        arrays: inputs by the service's names, [n] or [n, K], scattered, 0 elsewhere.
        targets: int64 [n, K], other tokens to score than the datum's own.
    """
    from tinker import types

    def write(array: np.ndarray) -> types.TensorData:
        return types.TensorData.from_numpy(np.asarray(array, np.int64 if array.dtype.kind == "i" else np.float32, "C"))

    end = int(np.flatnonzero(datum.mask)[-1]) + 1
    inputs = {"target_tokens": write(datum.tokens[1:end] if targets is None else datum.expand(targets)[1:end])}
    inputs |= {name: write(datum.expand(array)[1:end]) for name, array in arrays.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(datum.tokens[: end - 1].tolist()), loss_fn_inputs=inputs)


def _rows(response: types.ForwardBackwardOutput) -> list[np.ndarray]:
    """Return the arrays of an answer, of shape () where it has none."""
    outputs = [fields.get("logprobs") for fields in response.loss_fn_outputs]
    return [np.zeros(()) if x is None else np.asarray(x.to_numpy(), np.float32) for x in outputs]


def _read_logprobs(
    call: str, rows: Sequence[np.ndarray], data: Sequence[Datum], indices: Sequence[int]
) -> list[np.ndarray]:
    """Return float32 [n] or [n, K] per datum that was sent, from the service's arrays [N] or [N, K].

    Args:
        call: what was asked for.
        rows: the answer.
        data: the datums of the call.
        indices: which of them were sent.

    Raises:
        BackendError: the answer is of another size, or not finite where the policy chose.
    """
    if len(rows) != len(indices):
        raise BackendError(f"{call}: the service returned {len(rows)} outputs for {len(indices)} datums")
    logprobs = []
    for i, row in zip(indices, rows, strict=True):
        places = np.flatnonzero(data[i].mask) - 1
        if row.ndim == 0 or row.shape[0] <= places[-1]:
            raise BackendError(f"{call}: the service returned logprobs of shape {row.shape} for data[{i}], {data[i]!r}")
        logprobs.append(row[places])
        if not np.isfinite(logprobs[-1]).all():
            raise BackendError(f"{call}: the service returned non-finite logprobs for data[{i}]")
    return logprobs


class NotHosted(Exception):
    """Why no hosted calls are exactly the loss."""


@attrs.frozen(eq=False)
class HostedCall:
    """One hosted call.

    Attributes:
        loss: the service's name.
        config: its settings, always all of them: servers differ in their defaults.
        inputs: returns a datum's inputs of the loss, float32 [n] each by the service's names.
        chosen: returns which of a datum's tokens count, bool [n]; None for all. A datum without any is not sent.
    """

    loss: str
    config: Mapping[str, float]
    inputs: Callable[[Datum], Arrays]
    chosen: OfDatum | None = None

    def read(self, datum: Datum) -> Arrays | None:
        """Return the inputs, 0 where a token does not count; None where none does."""
        if self.chosen is None:
            return self.inputs(datum)
        chosen, inputs = self.chosen(datum), self.inputs(datum)
        return {name: np.where(chosen, x, np.float32(0)) for name, x in inputs.items()} if chosen.any() else None


def _read_input(datum: Datum, name: str, default: float | None = None) -> np.ndarray:
    """Return float32 [n]: an input of the policy's own tokens."""
    array = np.asarray(datum.inputs.get(name, default), np.float32)
    return datum.select(array) if array.ndim else np.full(int(datum.mask.sum()), array)


def _read_weights(datum: Datum) -> np.ndarray:
    return _read_input(datum, "weights", 1.0)


def _weigh_advantages(datum: Datum) -> np.ndarray:
    weighted: np.ndarray = _read_weights(datum) * _read_input(datum, "advantages")
    return weighted


def _require(possible: object, why: str) -> None:
    if not possible:
        raise NotHosted(why)


def _require_positive(data: Sequence[Datum]) -> None:
    # w min(a, b) is max(w a, w b) where w < 0
    _require(all((_read_weights(datum) >= 0).all() for datum in data), "its minimum requires weights >= 0")


def _weigh_logprobs(weights: OfDatum, chosen: OfDatum | None = None) -> HostedCall:
    """Return cross_entropy with these weights: -sum w lp."""
    return HostedCall("cross_entropy", {}, lambda datum: {"weights": weights(datum)}, chosen)


def _weigh_ratio(
    loss: str,
    settings: Settings,
    weights: OfDatum = _read_weights,
    behaviour: str = "sampling_logprobs",
    chosen: OfDatum | None = None,
) -> HostedCall:
    """Return a loss of the ratio to ``behaviour``, with A := w A."""

    def inputs(datum: Datum) -> Arrays:
        w = weights(datum)
        q = np.where(w != 0, _read_input(datum, behaviour), np.float32(0))
        return {"logprobs": q, "advantages": w * _read_input(datum, "advantages")}

    bounds = ("clip_low_threshold", "clip_high_threshold")
    return HostedCall(loss, {key: float(settings[key]) for key in bounds if key in settings}, inputs, chosen)


def _ppo(settings: Settings, data: Sequence[Datum]) -> list[HostedCall]:
    _require(settings["dual_clip"] is None, "the hosted ppo has no dual clip")
    _require_positive(data)
    return [_weigh_ratio("ppo", settings)]


def _cispo(settings: Settings, _: Sequence[Datum]) -> list[HostedCall]:
    _require(not settings["unified_mask"], "the hosted cispo has no unified mask")
    return [_weigh_ratio("cispo", settings)]


def _decoupled_ppo(settings: Settings, data: Sequence[Datum]) -> list[HostedCall]:
    _require_positive(data)
    cap = np.float32(np.inf if settings["behaviour_cap"] is None else settings["behaviour_cap"])

    # b > 0 may move into the minimum: b min(r A, c A) = min(r b A, c b A). So it is ppo from the old policy, of b A.
    def weights(datum: Datum) -> np.ndarray:
        w = _read_weights(datum)
        distance = _read_input(datum, "old_logprobs") - _read_input(datum, "sampling_logprobs")
        weighted: np.ndarray = w * np.minimum(np.exp(np.where(w != 0, distance, np.float32(0))), cap)
        return weighted

    return [_weigh_ratio("ppo", settings, weights, "old_logprobs")]


def _gspo_token(settings: Settings, data: Sequence[Datum]) -> list[HostedCall]:
    _require_positive(data)
    call = _weigh_ratio("gspo", settings)

    def inputs(datum: Datum) -> Arrays:
        q = _read_input(datum, "sampling_logprobs")  # whatever the weight: it is part of the sequence's ratio
        return {**call.inputs(datum), "logprobs": q, "sequence_ratio_mask": np.ones_like(q)}

    return [attrs.evolve(call, inputs=inputs)]


def _gspo(settings: Settings, data: Sequence[Datum]) -> list[HostedCall]:
    why = "the hosted gspo is the token form, another loss where advantages differ within a datum"
    _require(not any(np.ptp(_weigh_advantages(datum)) > 0 for datum in data), why)
    return _gspo_token(settings, data)


def _topr(settings: Settings, _: Sequence[Datum]) -> list[HostedCall]:
    """Clip the ratio to [0, 1], but above the threshold it has no say. A token counts in one call."""

    def is_above(datum: Datum) -> np.ndarray:
        above: np.ndarray = _read_input(datum, "advantages") > np.float32(settings["threshold"])
        return above

    bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": 1.0}
    other = _weigh_ratio("cispo", bounds, chosen=lambda datum: ~is_above(datum))
    return [_weigh_logprobs(_weigh_advantages, is_above), other]


def _mix(settings: Settings, data: Sequence[Datum]) -> list[HostedCall]:
    """Send the expert's tokens as cross entropy with weights w mu, the policy's as ppo with A := w (1 - mu) A."""
    _require(not settings["phi"], "its weights depend on the policy's probabilities")
    _require(settings["dual_clip"] is None, "the hosted ppo has no dual clip")
    _require_positive(data)

    def share(datum: Datum) -> np.ndarray:
        return _read_input(datum, "mu", 0.1)

    expert = _weigh_logprobs(lambda d: _read_weights(d) * share(d), lambda d: _read_input(d, "expert") != 0)
    own = _weigh_ratio(
        "ppo", settings, lambda d: _read_weights(d) * (1 - share(d)), chosen=lambda d: _read_input(d, "expert") == 0
    )
    return [expert, own]


HOSTED: Mapping[str, Callable[[Settings, Sequence[Datum]], list[HostedCall]]] = {
    "cispo": _cispo,
    "cross_entropy": lambda *_: [_weigh_logprobs(_read_weights)],
    "decoupled_ppo": _decoupled_ppo,
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "importance_sampling": lambda *_: [_weigh_ratio("importance_sampling", {})],
    "luspo": _gspo,
    "mix": _mix,
    "opmd": lambda settings, _: [
        _weigh_logprobs(lambda datum: _weigh_advantages(datum) * np.float32(1.0 / (1.0 + settings["tau"])))
    ],
    "ppo": _ppo,
    "reinforce": lambda *_: [_weigh_logprobs(_weigh_advantages)],
    "topr": _topr,
}
