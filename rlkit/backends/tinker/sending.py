"""How a training call is sent: by hosted losses, by a loss that runs on the service, or by a gradient taken here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlkit._lazy import torch
from rlkit._warn import warn
from rlkit.backends.protocol import Route
from rlkit.backends.queue import Inner, Sent
from rlkit.backends.tinker import custom, routes, wire
from rlkit.backends.tinker.calls import SendAndTake
from rlkit.backends.tinker.custom import ServerLosses
from rlkit.errors import RlkitError
from rlkit.types import Datum
from rlkit.types import ForwardBackwardOutput as Output

if TYPE_CHECKING:
    from tinker import TrainingClient, types

    from rlkit.losses.prepare import PreparedLoss

__all__ = ["Sending"]

_CALL = "forward_backward"


class Sending:
    """The training calls of one policy. Its methods run in the thread that sends.

    Args:
        weighs: whether the service's cross entropy is known to be a sum with weights of any sign.
    """

    def __init__(
        self, client: TrainingClient, losses: ServerLosses, executor: SendAndTake, *, weighs: bool = True
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
        refusal = self._losses.refusal(prepared, _used(data))
        if not refusal:
            return Route("server", ("custom",), why)
        weighted = "cross_entropy" if self._weighs or prepared.driver == "target_logprobs" else "cispo"
        return Route("client", ("forward", weighted), f"{why}; {refusal}")

    def forward(self, data: Sequence[Datum], prepared: PreparedLoss | None) -> Sent[Output]:
        """Ask for logprobs; the value of the loss is taken here."""
        places = _places(data)
        used = [data[i] for i in places]

        def finish(results: list[types.ForwardBackwardOutput]) -> Output:
            driver, chosen = _driver("forward", results[0], used, places, prepared) if used else ([], [])
            gradient = None if prepared is None else prepared.gradient(driver, used, places=places)
            return wire.output("forward", data, _placed(data, chosen), [], gradient)

        return Sent([self._forward(used, prepared)] if used else [], finish)

    def forward_backward(self, data: Sequence[Datum], prepared: PreparedLoss) -> Sent[Output]:
        """Send the loss's gradient by the cheapest exact way."""
        places = _places(data)
        if not places:
            return Sent([], lambda _: wire.output(_CALL, data, [None] * len(data), []))
        parts, _ = self._plan(prepared, data)
        if parts:
            return self._hosted(data, parts)
        return self._server(data, places, prepared) or self._here(data, places, prepared)

    def _hosted(self, data: Sequence[Datum], parts: Sequence[routes.Part]) -> Sent[Output]:
        chosen = [[i for i, arrays in enumerate(part.arrays) if arrays is not None] for part in parts]
        sent = []
        for part, places in zip(parts, chosen, strict=True):
            datums = [wire.send(data[i], part.arrays[i] or {}) for i in places]
            sent.append(self._client.forward_backward(datums, part.loss, dict(part.config) or None).future())

        def finish(results: list[types.ForwardBackwardOutput]) -> Output:
            logprobs: list[np.ndarray | None] = [None] * len(data)
            for response, places in zip(results, chosen, strict=True):
                for i, array in zip(
                    places, wire.read_logprobs(_CALL, response, [data[i] for i in places], places), strict=True
                ):
                    logprobs[i] = array
            return wire.output(_CALL, data, logprobs, [wire.metrics_of(_CALL, response) for response in results])

        return Sent(sent, finish)

    def _server(self, data: Sequence[Datum], places: Sequence[int], prepared: PreparedLoss) -> Sent[Output] | None:
        """Send the loss as a graph; None where the service does not take it."""
        used = [data[i] for i in places]
        future = self._losses.start(prepared, used)
        if future is None:
            return None
        try:
            handle = self._executor.wait("create_custom_loss", future)
        except RlkitError as error:
            self._losses.refused(prepared, used, error)
            return None
        if handle.loss_id is None:
            self._losses.refused(prepared, used, ValueError("it gave the loss no id"))
            return None
        datums = [wire.send(datum, custom.arrays(prepared, datum)) for datum in used]
        sent = self._client.forward_backward_custom(datums, handle).future()

        def finish(results: list[types.ForwardBackwardOutput]) -> Output:
            logprobs = wire.read_logprobs(_CALL, results[0], used, places)
            return wire.output(_CALL, data, _placed(data, logprobs), [wire.metrics_of(_CALL, results[0])])

        return Sent([sent], finish)

    def _here(self, data: Sequence[Datum], places: Sequence[int], prepared: PreparedLoss) -> Sent[Output]:
        """Send the gradient with respect to the logprobs as weights of a cross entropy: exact for any loss of them.

        The loss is evaluated before the gradient is sent, so that a mistake in it changes nothing.
        """
        used = [data[i] for i in places]
        response = self._executor.wait("forward", self._forward(used, prepared))
        driver, chosen = _driver(_CALL, response, used, places, prepared)
        local = prepared.gradient(driver, used, places=places)
        targets: list[np.ndarray | None] = [None] * len(used)
        part = routes.Part("cross_entropy", {}, [{"weights": -gradient.numpy()} for gradient in local.driver])
        if prepared.driver == "target_logprobs":
            targets = [_targets(datum) for datum in used]
            wide = [np.pad(-gradient.numpy(), ((0, 0), (0, 1))) for gradient in local.driver]
            part = routes.Part("cross_entropy", {}, [{"weights": weights} for weights in wide])
        elif not self._weighs:
            part = routes.without_weights(part)
        datums = [wire.send(d, x or {}, t) for d, x, t in zip(used, part.arrays, targets, strict=True)]
        sent = self._client.forward_backward(datums, part.loss, dict(part.config) or None).future()
        return Sent([sent], lambda _: wire.output(_CALL, data, _placed(data, chosen), [], local))

    def why_not_hosted(self, prepared: PreparedLoss, data: Sequence[Datum]) -> str:
        """Return why hosted calls do not give this loss, "" where they do; needs no torch."""
        parts, why = self._plan(prepared, data)
        return "" if parts or not _used(data) else why

    def _plan(self, prepared: PreparedLoss, data: Sequence[Datum]) -> tuple[Sequence[routes.Part], str]:
        if not prepared.named:
            return (), "it is given as a function, which is run as it is written"
        parts, why = routes.plan(prepared.name, prepared.settings, data)
        return (parts if self._weighs else [routes.without_weights(part) for part in parts]), why

    def warn(self, prepared: PreparedLoss) -> None:
        """Warn once, in the caller's thread, that a matrix of weights goes by no other loss."""
        if prepared.driver == "target_logprobs" and not self._weighs and not self._warned:
            self._warned = True
            warn(
                f"the loss {prepared.name!r} is sent as a cross entropy with weights of both signs, and this server, "
                "neither the hosted one nor rlkit's, may divide by their sum: compare a step with another backend's",
            )

    def _forward(self, used: Sequence[Datum], prepared: PreparedLoss | None) -> Inner[types.ForwardBackwardOutput]:
        wide = prepared is not None and prepared.driver == "target_logprobs"
        datums = []
        for datum in used:
            targets = _targets(datum) if wide else None
            shape = (int(datum.mask.sum()),) if targets is None else targets.shape
            datums.append(wire.send(datum, {"weights": np.zeros(shape, np.float32)}, targets))
        sent: Inner[types.ForwardBackwardOutput] = self._client.forward(datums, "cross_entropy", None).future()
        return sent


def _used(data: Sequence[Datum]) -> list[Datum]:
    return [data[i] for i in _places(data)]


def _places(data: Sequence[Datum]) -> list[int]:
    """Return which datums are sent: those with a token of the policy's own."""
    return [i for i, datum in enumerate(data) if datum.mask.any()]


def _placed(data: Sequence[Datum], arrays: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """Return one entry per datum, of arrays for those that were sent."""
    left = iter(arrays)
    return [next(left) if datum.mask.any() else None for datum in data]


def _targets(datum: Datum) -> np.ndarray:
    """Return int64 [n, K + 1]: the tokens to score, 0 for none, and last the datum's own."""
    targets = datum.inputs["target_tokens"][datum.mask]
    targets = targets.reshape(len(targets), -1)
    return np.column_stack([np.maximum(targets, 0), datum.tokens[datum.mask]])


def _driver(
    call: str,
    response: types.ForwardBackwardOutput,
    used: Sequence[Datum],
    places: Sequence[int],
    prepared: PreparedLoss | None,
) -> tuple[list[torch.Tensor], list[np.ndarray]]:
    """Return (what the loss is given, the logprobs of the datums' own tokens)."""
    arrays = wire.read_logprobs(call, response, used, places)
    if prepared is None:
        return [], arrays
    if prepared.driver == "logprobs":
        return [torch.from_numpy(x) for x in arrays], arrays
    driver = [torch.from_numpy(np.ascontiguousarray(x[:, :-1])) for x in arrays]
    return driver, [x[:, -1] for x in arrays]
