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

__all__ = ["HOSTED", "HostedCall", "find_route", "plan_hosted_calls", "send_forward", "send_loss"]


def find_route(data: Sequence[Datum], prepared: PreparedLoss) -> Route:
    """Return the way that these datums take; send nothing."""
    calls, why = _plan(data, prepared)
    if calls:
        return Route("hosted" if len(calls) == 1 else "composed", tuple(call.loss for call in calls))
    return Route("client", ("forward", "cross_entropy"), why)


def send_forward(client: TrainingClient, data: Sequence[Datum], prepared: PreparedLoss | None) -> PendingResult[Output]:
    """Ask for logprobs; the value of the loss is taken here."""
    indices = _trained_indices(data)
    if not indices:
        return PendingResult([], lambda _: assemble_output(data, _spread(data, []), {}))

    def finish(results: list[types.ForwardBackwardOutput]) -> Output:
        logprobs = read_logprobs("forward", _rows(results[0]), data, indices)
        if prepared is None:
            return assemble_output(data, _spread(data, logprobs), {})
        found, logprobs = _differentiate(prepared, logprobs, data, indices)
        return assemble_output(data, _spread(data, logprobs), {}, [found])

    datums = [_scored_datum(data[i], prepared) for i in indices]
    return PendingResult([client.forward(datums, "cross_entropy").future()], finish)


def send_loss(client: TrainingClient, data: Sequence[Datum], prepared: PreparedLoss) -> PendingResult[Output]:
    """Send the loss's gradient by the cheapest exact way."""
    if not _trained_indices(data):
        return PendingResult([], lambda _: assemble_output(data, _spread(data, []), {}))
    calls, _ = _plan(data, prepared)
    return _send_hosted(client, data, calls) if calls else _send_custom(client, data, prepared)


def _plan(data: Sequence[Datum], prepared: PreparedLoss) -> tuple[Sequence[HostedCall], str]:
    if not prepared.named:
        return (), "it is given as a function, which runs in this process as written"
    return plan_hosted_calls(prepared.name, prepared.settings, data)


def _send_hosted(client: TrainingClient, data: Sequence[Datum], calls: Sequence[HostedCall]) -> PendingResult[Output]:
    chosen = [[i for i, arrays in enumerate(call.arrays) if arrays is not None] for call in calls]
    sent = []
    for call, indices in zip(calls, chosen, strict=True):
        datums = [to_sdk_datum(data[i], call.arrays[i] or {}) for i in indices]
        sent.append(client.forward_backward(datums, call.loss, dict(call.config) or None).future())

    def finish(results: list[types.ForwardBackwardOutput]) -> Output:
        logprobs = [np.zeros(int(datum.mask.sum()), np.float32) for datum in data]
        metrics = {"loss:sum": 0.0}
        for response, indices in zip(results, chosen, strict=True):
            rows = read_logprobs("forward_backward", _rows(response), data, indices)
            for i, row in zip(indices, rows, strict=True):
                logprobs[i] = row
            names.add(metrics, _read_metrics(response), len(indices))
        # A mean is over the datums that were sent, as on other backends; several calls may have sent the same ones.
        averaged = names.averaged(metrics, sum(map(len, chosen)))
        return assemble_output(data, logprobs, {}, metrics=averaged)

    return PendingResult(sent, finish)


def _read_metrics(response: types.ForwardBackwardOutput) -> dict[str, float]:
    metrics = {key: float(x) for key, x in (response.metrics or {}).items() if key == names.with_ending(key)}
    if not np.isfinite(metrics.get("loss:sum", np.nan)):  # the service may measure what has no value; a loss may not
        raise BackendError(f"forward_backward: the service's loss is {metrics.get('loss:sum')}")
    return metrics


def _send_custom(client: TrainingClient, data: Sequence[Datum], prepared: PreparedLoss) -> PendingResult[Output]:
    """Have the SDK ask for logprobs, evaluate the loss, and send its gradient as the weights of a cross entropy.

    That is exact for any loss of the logprobs.
    """
    indices = _trained_indices(data)
    kept: list[tuple[LossGradient, list[np.ndarray]]] = []

    def loss(_: object, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """Return a value with the loss's gradient."""
        rows = read_logprobs("forward_backward", [x.detach().numpy() for x in logprobs], data, indices)
        kept.append(_differentiate(prepared, rows, data, indices))
        terms = []
        for i, x, gradient in zip(indices, logprobs, kept[0][0].driver, strict=True):
            weights, places = x.new_zeros(x.shape), np.flatnonzero(data[i].mask) - 1
            if gradient.ndim == 1:
                weights[places] = gradient
            else:  # the last column has the datum's own tokens
                weights[places, :-1] = gradient * gradient.new_tensor(_find_real(data[i]))
            terms.append((x * weights).sum())
        return sum(terms, start=logprobs[0].new_zeros(())), {}

    datums = [_scored_datum(data[i], prepared) for i in indices]

    def finish(_: object) -> Output:
        found, chosen = kept[0]
        return assemble_output(data, _spread(data, chosen), {}, [found])

    return PendingResult([client.forward_backward_custom(datums, loss).future()], finish)


def _differentiate(
    prepared: PreparedLoss, rows: Sequence[np.ndarray], data: Sequence[Datum], indices: Sequence[int]
) -> tuple[LossGradient, list[np.ndarray]]:
    """Return the gradient of a loss by what ``read_logprobs`` gave, and the logprobs of the datums' own tokens.

    Raises:
        LossFailed: whatever the loss raised.
    """
    import torch

    used = [data[i] for i in indices]
    driver = own = list(rows)
    if prepared.driver == "target_logprobs":
        driver = [np.where(_find_real(d), x[:, :-1], np.float32(0)) for d, x in zip(used, rows, strict=True)]
        own = [x[:, -1] for x in rows]
    try:
        return prepared.gradient([torch.from_numpy(x) for x in driver], used, places=indices), own
    except BaseException as error:
        raise LossFailed(error) from error


def _trained_indices(data: Sequence[Datum]) -> list[int]:
    """Return which datums are sent: those with a token of the policy's own."""
    return [i for i, datum in enumerate(data) if datum.mask.any()]


def _spread(data: Sequence[Datum], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return one array [n] per datum, of arrays for those that were sent; the others have no token."""
    left = iter(arrays)
    return [next(left) if datum.mask.any() else np.zeros(0, np.float32) for datum in data]


def _find_real(datum: Datum) -> np.ndarray:
    """Return which targets [n, K] are tokens; the others, -1, are sent as 0 and count nothing."""
    targets: np.ndarray = datum.inputs["target_tokens"][datum.mask]
    return targets >= 0


def _scored_datum(datum: Datum, prepared: PreparedLoss | None) -> types.Datum:
    """Return the SDK's datum whose logprobs are asked for: with targets these, 0 for none, and last its own tokens."""
    if prepared is None or prepared.driver != "target_logprobs":
        return to_sdk_datum(datum, {"weights": np.zeros(int(datum.mask.sum()), np.float32)})
    targets = np.maximum(datum.inputs["target_tokens"][datum.mask], 0)
    targets = np.column_stack([targets, datum.tokens[datum.mask]])
    return to_sdk_datum(datum, {"weights": np.zeros(targets.shape, np.float32)}, targets)


def to_sdk_datum(datum: Datum, arrays: Mapping[str, np.ndarray], targets: np.ndarray | None = None) -> types.Datum:
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


def read_logprobs(
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


Arrays: TypeAlias = Mapping[str, np.ndarray]
Settings: TypeAlias = Mapping[str, Any]


@attrs.frozen(eq=False)
class HostedCall:
    """One hosted call.

    Attributes:
        loss: the service's name.
        config: its settings, always all of them: servers differ in their defaults.
        arrays: per datum the loss's inputs, float32 [n] each by the service's names; None where the datum is not sent.
    """

    loss: str
    config: Mapping[str, float]
    arrays: Sequence[Arrays | None]


def plan_hosted_calls(name: str, settings: Settings, data: Sequence[Datum]) -> tuple[Sequence[HostedCall], str]:
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
    calls = make(settings, used)
    return ((), calls) if isinstance(calls, str) else (calls, "")


def _read_input(datum: Datum, name: str, default: float | None = None) -> np.ndarray:
    """Return float32 [n]: an input of the policy's own tokens."""
    n = int(datum.mask.sum())
    array = datum.inputs[name] if default is None or name in datum.inputs else np.float32(default)
    array = np.asarray(array, np.float32)
    values: np.ndarray = np.full(n, array, np.float32) if array.ndim == 0 else array[datum.mask]
    return values


def _read_weights(datum: Datum) -> np.ndarray:
    return _read_input(datum, "weights", 1.0)


_POSITIVE = "its minimum requires weights >= 0"  # w min(a, b) is max(w a, w b) where w < 0


def _has_negative_weights(data: Sequence[Datum | None]) -> bool:
    return any(datum is not None and bool((_read_weights(datum) < 0).any()) for datum in data)


def _map_datums(data: Sequence[Datum | None], arrays: Callable[[Datum], Arrays | None]) -> list[Arrays | None]:
    return [None if datum is None else arrays(datum) for datum in data]


def _drop_empty(*calls: HostedCall) -> list[HostedCall]:
    """Return those in which a datum is sent."""
    return [call for call in calls if any(arrays is not None for arrays in call.arrays)]


def _weigh_logprobs(data: Sequence[Datum | None], weights: Callable[[Datum], np.ndarray]) -> list[HostedCall]:
    """Return cross_entropy with these weights: -sum w lp."""
    return [HostedCall("cross_entropy", {}, _map_datums(data, lambda d: {"weights": weights(d)}))]


def _weigh_ratio(
    loss: str,
    data: Sequence[Datum | None],
    config: Mapping[str, float],
    advantages: Callable[[Datum], np.ndarray],
    behaviour: str = "sampling_logprobs",
) -> list[HostedCall]:
    def arrays(datum: Datum) -> Arrays:
        q = np.where(_read_weights(datum) != 0, _read_input(datum, behaviour), np.float32(0))
        return {"logprobs": q, "advantages": advantages(datum)}

    return [HostedCall(loss, config, _map_datums(data, arrays))]


def _weigh_advantages(datum: Datum) -> np.ndarray:
    folded: np.ndarray = _read_weights(datum) * _read_input(datum, "advantages")
    return folded


def _read_bounds(settings: Settings) -> dict[str, float]:
    return {key: float(settings[key]) for key in ("clip_low_threshold", "clip_high_threshold")}


def _ppo(settings: Settings, data: Sequence[Datum | None]) -> list[HostedCall] | str:
    if settings["dual_clip"] is not None:
        return "the hosted ppo has no dual clip"
    if _has_negative_weights(data):
        return _POSITIVE
    return _weigh_ratio("ppo", data, _read_bounds(settings), _weigh_advantages)


def _cispo(settings: Settings, data: Sequence[Datum | None]) -> list[HostedCall] | str:
    if settings["unified_mask"]:
        return "the hosted cispo has no unified mask"
    return _weigh_ratio("cispo", data, _read_bounds(settings), _weigh_advantages)


def _decoupled_ppo(settings: Settings, data: Sequence[Datum | None]) -> list[HostedCall] | str:
    if _has_negative_weights(data):
        return _POSITIVE
    cap = settings["behaviour_cap"]

    # b > 0 may move into the minimum: b min(r A, c A) = min(r b A, c b A). So it is ppo from the old policy, of b A.
    def advantages(datum: Datum) -> np.ndarray:
        distance = _read_input(datum, "old_logprobs") - _read_input(datum, "sampling_logprobs")
        behaviour = np.exp(np.where(_read_weights(datum) != 0, distance, np.float32(0)))
        capped: np.ndarray = behaviour if cap is None else np.minimum(behaviour, np.float32(cap))
        weighted: np.ndarray = _weigh_advantages(datum) * capped
        return weighted

    return _weigh_ratio("ppo", data, _read_bounds(settings), advantages, "old_logprobs")


def _gspo_token(settings: Settings, data: Sequence[Datum | None]) -> list[HostedCall] | str:
    if _has_negative_weights(data):
        return _POSITIVE

    def arrays(datum: Datum) -> Arrays:
        folded = _weigh_advantages(datum)
        q = _read_input(datum, "sampling_logprobs")  # whatever the weight: it is part of the sequence's ratio
        return {"logprobs": q, "advantages": folded, "sequence_ratio_mask": np.ones_like(folded)}

    return [HostedCall("gspo", _read_bounds(settings), _map_datums(data, arrays))]


def _gspo(settings: Settings, data: Sequence[Datum | None]) -> list[HostedCall] | str:
    for datum in data:
        if datum is not None and np.ptp(_weigh_advantages(datum)) > 0:
            return "the hosted gspo is the token form, another loss where advantages differ within a datum"
    return _gspo_token(settings, data)


def _topr(settings: Settings, data: Sequence[Datum | None]) -> list[HostedCall] | str:
    """Clip the ratio to [0, 1], but above the threshold it has no say. A token counts in one call."""
    threshold = np.float32(settings["threshold"])

    def positive(datum: Datum) -> Arrays | None:
        chosen = _read_input(datum, "advantages") > threshold
        return {"weights": np.where(chosen, _weigh_advantages(datum), np.float32(0))} if chosen.any() else None

    def other(datum: Datum) -> Arrays | None:
        chosen = _read_input(datum, "advantages") <= threshold
        if not chosen.any():
            return None
        advantages = np.where(chosen, _weigh_advantages(datum), np.float32(0))
        return {"logprobs": _read_input(datum, "sampling_logprobs"), "advantages": advantages}

    bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": 1.0}
    return _drop_empty(
        HostedCall("cross_entropy", {}, _map_datums(data, positive)),
        HostedCall("cispo", bounds, _map_datums(data, other)),
    )


def _mix(settings: Settings, data: Sequence[Datum | None]) -> list[HostedCall] | str:
    """Send the expert's tokens as cross entropy with weights w mu, the policy's as ppo with A := w (1 - mu) A."""
    if settings["phi"]:
        return "its weights depend on the policy's probabilities"
    if settings["dual_clip"] is not None:
        return "the hosted ppo has no dual clip"
    if _has_negative_weights(data):
        return _POSITIVE

    def expert(datum: Datum) -> Arrays | None:
        chosen = _read_input(datum, "expert") != 0
        weights = _read_weights(datum) * _read_input(datum, "mu", 0.1)
        return {"weights": np.where(chosen, weights, np.float32(0))} if chosen.any() else None

    def own(datum: Datum) -> Arrays | None:
        chosen = _read_input(datum, "expert") == 0
        if not chosen.any():
            return None
        zero = np.float32(0)
        mu = _read_input(datum, "mu", 0.1)
        advantages = np.where(chosen, _weigh_advantages(datum) * (1 - mu), zero)
        counted = chosen & (_read_weights(datum) != 0) & (mu != 1)
        return {"logprobs": np.where(counted, _read_input(datum, "sampling_logprobs"), zero), "advantages": advantages}

    return _drop_empty(
        HostedCall("cross_entropy", {}, _map_datums(data, expert)),
        HostedCall("ppo", _read_bounds(settings), _map_datums(data, own)),
    )


HOSTED: Mapping[str, Callable[[Settings, Sequence[Datum | None]], list[HostedCall] | str]] = {
    "cispo": _cispo,
    "cross_entropy": lambda _, data: _weigh_logprobs(data, _read_weights),
    "decoupled_ppo": _decoupled_ppo,
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "importance_sampling": lambda _, data: _weigh_ratio("importance_sampling", data, {}, _weigh_advantages),
    "luspo": _gspo,
    "mix": _mix,
    "opmd": lambda settings, data: _weigh_logprobs(
        data, lambda d: _weigh_advantages(d) * np.float32(1.0 / (1.0 + settings["tau"]))
    ),
    "ppo": _ppo,
    "reinforce": lambda _, data: _weigh_logprobs(data, _weigh_advantages),
    "topr": _topr,
}
