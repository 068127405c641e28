"""How a training call is sent: by hosted losses, by a loss that runs on the service, or by a gradient taken here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlkit._runtime import warn
from rlkit.backends.protocol import Route
from rlkit.backends.tinker import _routes
from rlkit.backends.tinker._requests import ServiceExecutor
from rlkit.backends.tinker._routes import ServerLosses, arrays
from rlkit.backends.trainer import Inner, PendingResult, assemble_output
from rlkit.errors import BackendError, RlkitError
from rlkit.metrics import names
from rlkit.types import Datum
from rlkit.types import ForwardBackwardOutput as Output

if TYPE_CHECKING:
    import torch
    from tinker import TrainingClient, types

    from rlkit.losses.prepare import PreparedLoss

__all__ = ["Sending", "metrics_of", "output", "read_logprobs", "send"]


def send(datum: Datum, arrays: Mapping[str, np.ndarray], targets: np.ndarray | None = None) -> types.Datum:
    """Return the SDK's datum.

    What follows the last token of the policy's own has no influence and is left out.

    Args:
        datum: with at least one token of the policy's own.
        arrays: inputs by the service's names: () as it is, [n] or [n, K] scattered, 0 elsewhere.
        targets: int64 [n, K], other tokens to score than the datum's own.
    """
    from tinker import types

    end = int(np.flatnonzero(datum.mask)[-1]) + 1
    inputs = {"target_tokens": _tensor(datum.tokens[1:end] if targets is None else datum.expand(targets)[1:end])}
    for name, array in arrays.items():
        inputs[name] = _tensor(array if array.ndim == 0 else datum.expand(array)[1:end])
    return types.Datum(model_input=types.ModelInput.from_ints(datum.tokens[: end - 1].tolist()), loss_fn_inputs=inputs)


def _tensor(array: np.ndarray) -> types.TensorData:
    from tinker import types

    dtype = np.int64 if array.dtype.kind == "i" else np.float32
    return types.TensorData.from_numpy(np.asarray(array, dtype, order="C"))


def read_logprobs(
    call: str, response: types.ForwardBackwardOutput, data: Sequence[Datum], places: Sequence[int]
) -> list[np.ndarray]:
    """Return float32 [n] or [n, K] per datum that was sent, from the arrays [N] or [N, K] of an answer.

    Args:
        call: what was asked for.
        response: the answer.
        data: what was sent.
        places: where the user's list has them, for errors.

    Raises:
        BackendError: the answer is of another size, or not finite where the policy chose.
    """
    outputs = response.loss_fn_outputs
    if len(outputs) != len(data):
        raise BackendError(f"{call}: the service returned {len(outputs)} outputs for {len(data)} datums")
    arrays = []
    for i, fields, datum in zip(places, outputs, data, strict=True):
        chosen = np.flatnonzero(datum.mask) - 1
        if "logprobs" not in fields:
            raise BackendError(f"{call}: the service returned no logprobs for data[{i}]")
        array = np.asarray(fields["logprobs"].to_numpy(), np.float32)
        if array.ndim == 0 or array.shape[0] <= chosen[-1]:
            raise BackendError(f"{call}: the service returned logprobs of shape {array.shape} for data[{i}], {datum!r}")
        logprobs = array[chosen]
        if not np.isfinite(logprobs).all():
            raise BackendError(f"{call}: the service returned non-finite logprobs for data[{i}]")
        arrays.append(logprobs)
    return arrays


def metrics_of(call: str, response: types.ForwardBackwardOutput) -> Mapping[str, float]:
    """Return what the service measured; the loss is the sum of its terms where that is all that the service gives.

    Raises:
        BackendError: it gave no loss at all.
    """
    metrics = dict(response.metrics or {})
    if "loss:sum" not in metrics:
        terms = [fields.get("elementwise_loss") for fields in response.loss_fn_outputs]
        if any(x is None for x in terms):
            raise BackendError(f"{call}: the service returned no loss")
        metrics["loss:sum"] = float(sum(np.sum(x.to_numpy(), dtype=np.float64) for x in terms))
    return metrics


def output(
    call: str,
    data: Sequence[Datum],
    logprobs: Sequence[np.ndarray],
    metrics: Sequence[tuple[Mapping[str, float], int]],
) -> Output:
    """Return what a call returns whose loss the service has evaluated.

    Args:
        call: for messages.
        data: all datums of the call.
        logprobs: [n] per datum.
        metrics: of each part of the call, as the service gave them, with the number of its datums.

    Raises:
        BackendError: the loss is not finite.
    """
    merged: dict[str, float] = {"loss:sum": 0.0}
    for part, number in metrics:
        known = {key.removeprefix("custom/"): float(v) for key, v in part.items() if key == names.with_ending(key)}
        names.add(merged, known, number)
    own = [key.removeprefix("custom/") for part, _ in metrics for key in part if key.startswith("custom/")]
    for key in ("loss:sum", *own):  # the service may measure what has no value; a loss may not
        if not np.isfinite(merged.get(key, 0.0)):
            raise BackendError(f"{call}: the {'loss' if key == 'loss:sum' else f'metric {key!r}'} is {merged[key]}")
    # A mean is over the datums that were sent, as on other backends; several parts may have sent the same ones.
    count = sum(number for _, number in metrics)
    return assemble_output(data, logprobs, {}, metrics=names.averaged(merged, max(count, 1)))


_CALL = "forward_backward"


class Sending:
    """The training calls of one policy. Its methods run in the thread that sends.

    Args:
        weighs: whether the service's cross entropy is known to be a sum with weights of any sign.
    """

    def __init__(
        self, client: TrainingClient, losses: ServerLosses, executor: ServiceExecutor, *, weighs: bool = True
    ) -> None:
        self._weighs = weighs
        self._warned = False
        self._client = client
        self._losses = losses
        self._executor = executor

    def route(self, data: Sequence[Datum], prepared: PreparedLoss) -> Route:
        """Return the way that these datums take; send nothing."""
        parts, why = self._plan(prepared, data)
        if parts:
            return Route("hosted" if len(parts) == 1 else "composed", tuple(part.loss for part in parts))
        graph = self._losses.choose(prepared, _used(data))
        if not isinstance(graph, str):
            return Route("server", ("custom",), why)
        weighted = "cross_entropy" if self._weighs or prepared.driver == "target_logprobs" else "cispo"
        return Route("client", ("forward", weighted), f"{why}; {graph}")

    def forward(self, data: Sequence[Datum], prepared: PreparedLoss | None) -> PendingResult[Output]:
        """Ask for logprobs; the value of the loss is taken here."""
        places = _places(data)
        used = [data[i] for i in places]

        def finish(results: list[types.ForwardBackwardOutput]) -> Output:
            driver, chosen = _driver("forward", results[0], used, places, prepared) if used else ([], [])
            gradient = None if prepared is None else prepared.gradient(driver, used, places=places)
            return assemble_output(data, _placed(data, chosen), {}, [gradient])

        return PendingResult([self._forward(used, prepared)] if used else [], finish)

    def forward_backward(self, data: Sequence[Datum], prepared: PreparedLoss) -> PendingResult[Output]:
        """Send the loss's gradient by the cheapest exact way."""
        places = _places(data)
        if not places:
            return PendingResult([], lambda _: output(_CALL, data, _placed(data, []), []))
        parts, _ = self._plan(prepared, data)
        if parts:
            return self._hosted(data, parts)
        return self._server(data, places, prepared) or self._here(data, places, prepared)

    def _hosted(self, data: Sequence[Datum], parts: Sequence[_routes.Part]) -> PendingResult[Output]:
        chosen = [[i for i, arrays in enumerate(part.arrays) if arrays is not None] for part in parts]
        sent = []
        for part, places in zip(parts, chosen, strict=True):
            sent.append(self._send(part, [send(data[i], part.arrays[i] or {}) for i in places]))

        def finish(results: list[types.ForwardBackwardOutput]) -> Output:
            logprobs = [np.zeros(int(datum.mask.sum()), np.float32) for datum in data]
            metrics = []
            for response, places in zip(results, chosen, strict=True):
                arrays = read_logprobs(_CALL, response, [data[i] for i in places], places)
                for i, array in zip(places, arrays, strict=True):
                    logprobs[i] = array
                metrics.append((metrics_of(_CALL, response), len(places)))
            return output(_CALL, data, logprobs, metrics)

        return PendingResult(sent, finish)

    def _server(
        self, data: Sequence[Datum], places: Sequence[int], prepared: PreparedLoss
    ) -> PendingResult[Output] | None:
        """Send the loss as a graph; None where the service does not take it."""
        used = [data[i] for i in places]
        graph = self._losses.choose(prepared, used)
        if isinstance(graph, str):
            return None
        future = self._losses.start(graph)
        try:
            handle = self._executor.wait("create_custom_loss", future)
            if handle.loss_id is None:
                raise BackendError("it returned no id for the loss")
        except RlkitError as error:
            self._losses.refused(prepared.name, graph, error)
            return None
        datums = [send(datum, arrays(prepared, datum)) for datum in used]
        sent = self._client.forward_backward_custom(datums, handle).future()

        def finish(results: list[types.ForwardBackwardOutput]) -> Output:
            logprobs = read_logprobs(_CALL, results[0], used, places)
            return output(_CALL, data, _placed(data, logprobs), [(metrics_of(_CALL, results[0]), len(used))])

        return PendingResult([sent], finish)

    def _here(self, data: Sequence[Datum], places: Sequence[int], prepared: PreparedLoss) -> PendingResult[Output]:
        """Send the gradient with respect to the logprobs as weights of a cross entropy: exact for any loss of them.

        The loss is evaluated before the gradient is sent, so that a mistake in it changes nothing.
        """
        used = [data[i] for i in places]
        response = self._executor.wait("forward", self._forward(used, prepared))
        driver, chosen = _driver(_CALL, response, used, places, prepared)
        local = prepared.gradient(driver, used, places=places)
        weights = [-gradient.numpy() for gradient in local.driver]
        if prepared.driver == "target_logprobs":
            weights = [np.where(_real(d), x, 0.0) for d, x in zip(used, weights, strict=True)]
            weights = [np.pad(x, ((0, 0), (0, 1))) for x in weights]  # 0 for the datum's own tokens, the last column
        part = _routes.Part("cross_entropy", {}, [{"weights": x} for x in weights])
        if not self._weighs:
            part = _routes.without_weights(part)
        datums = [send(d, x or {}, _targets(d, prepared)) for d, x in zip(used, part.arrays, strict=True)]
        sent = self._send(part, datums)
        return PendingResult([sent], lambda _: assemble_output(data, _placed(data, chosen), {}, [local]))

    def _send(self, part: _routes.Part, datums: list[types.Datum]) -> Inner[types.ForwardBackwardOutput]:
        sent: Inner[types.ForwardBackwardOutput]
        sent = self._client.forward_backward(datums, part.loss, dict(part.config) or None).future()
        return sent

    def _plan(self, prepared: PreparedLoss, data: Sequence[Datum]) -> tuple[Sequence[_routes.Part], str]:
        if not prepared.named:
            return (), "it is given as a function, which runs in this process as written"
        parts, why = _routes.plan(prepared.name, prepared.settings, data)
        return (parts if self._weighs else [_routes.without_weights(part) for part in parts]), why

    def warn(self, prepared: PreparedLoss) -> None:
        """Warn once, in the caller's thread, that a matrix of weights goes by no other loss."""
        if prepared.driver == "target_logprobs" and not self._weighs and not self._warned:
            self._warned = True
            warn(
                f"the loss {prepared.name!r} is sent as a cross entropy with weights of both signs; this server, not "
                "the hosted one nor rlkit's, may divide by their sum: compare one step with another backend's",
            )

    def _forward(self, used: Sequence[Datum], prepared: PreparedLoss | None) -> Inner[types.ForwardBackwardOutput]:
        datums = []
        for datum in used:
            targets = _targets(datum, prepared)
            shape = (int(datum.mask.sum()),) if targets is None else targets.shape
            datums.append(send(datum, {"weights": np.zeros(shape, np.float32)}, targets))
        sent: Inner[types.ForwardBackwardOutput] = self._client.forward(datums, "cross_entropy", None).future()
        return sent


def _used(data: Sequence[Datum]) -> list[Datum]:
    return [data[i] for i in _places(data)]


def _places(data: Sequence[Datum]) -> list[int]:
    """Return which datums are sent: those with a token of the policy's own."""
    return [i for i, datum in enumerate(data) if datum.mask.any()]


def _placed(data: Sequence[Datum], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return one array [n] per datum, of arrays for those that were sent; the others have no token."""
    left = iter(arrays)
    return [next(left) if datum.mask.any() else np.zeros(0, np.float32) for datum in data]


def _targets(datum: Datum, prepared: PreparedLoss | None) -> np.ndarray | None:
    """Return int64 [n, K + 1] where the loss scores targets: these, 0 for none, and last the datum's own tokens."""
    if prepared is None or prepared.driver != "target_logprobs":
        return None
    targets = datum.inputs["target_tokens"][datum.mask]
    targets = targets.reshape(len(targets), -1)
    return np.column_stack([np.maximum(targets, 0), datum.tokens[datum.mask]])


def _real(datum: Datum) -> np.ndarray:
    """Return which targets [n, K] are tokens; the others, -1, are sent as 0 and count nothing."""
    targets: np.ndarray = datum.inputs["target_tokens"][datum.mask]
    return targets.reshape(len(targets), -1) >= 0


def _driver(
    call: str,
    response: types.ForwardBackwardOutput,
    used: Sequence[Datum],
    places: Sequence[int],
    prepared: PreparedLoss | None,
) -> tuple[list[torch.Tensor], list[np.ndarray]]:
    """Return (what the loss is given, the logprobs of the datums' own tokens)."""
    import torch

    arrays = read_logprobs(call, response, used, places)
    if prepared is None:
        return [], arrays
    if prepared.driver == "logprobs":
        return [torch.from_numpy(x) for x in arrays], arrays
    driver = [torch.from_numpy(np.where(_real(d), x[:, :-1], np.float32(0))) for d, x in zip(used, arrays, strict=True)]
    return driver, [x[:, -1] for x in arrays]
