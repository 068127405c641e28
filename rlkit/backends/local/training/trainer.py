"""Gradients and optimizer steps of the adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import attrs
import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlkit.backends._memory import telling
from rlkit.backends.local.model.memory import to_device
from rlkit.backends.local.training.micro_batches import MicroBatch, pack
from rlkit.backends.trainer import DISTRIBUTION_OUTPUTS
from rlkit.errors import BackendError, RankLost
from rlkit.types import Adam, Datum

if TYPE_CHECKING:
    from rlkit.backends.local.training.forward import TrainingForward
    from rlkit.losses.prepare import Driver, Level, LossGradient

__all__ = ["Flat", "Hands", "Inputs", "LocalTrainer", "Loss", "Outputs", "backpropagate"]

Outputs = dict[str, list[torch.Tensor]]  # name -> one float32 tensor per datum, on the CPU
Flat: TypeAlias = Mapping[str, torch.Tensor]  # name -> [n] or [n, K], of a micro-batch's masked-in tokens, in order


@attrs.frozen(eq=False)
class Inputs:
    """A micro-batch, the ids that each output is about (None: of no ids), and temperatures [n] where not all are 1."""

    batch: MicroBatch
    wanted: Mapping[str, torch.Tensor | None]
    temperatures: torch.Tensor | None


class Hands(Protocol):
    """Other processes that compute micro-batches of the same model, one each in every round."""

    @property
    def size(self) -> int:
        """Return the number of processes, this one included."""

    def forward(self, others: Sequence[Inputs], own: Callable[[], Flat], *, gradient: bool) -> list[Flat]:
        """Return what this process computes by ``own``, and then what the others compute of ``others``."""

    def backward(self, others: Sequence[Sequence[torch.Tensor]], names: Sequence[str], own: Callable[[], None]) -> None:
        """Continue backwards from the gradients of the outputs ``names`` of the last round's micro-batches."""

    def sum_gradients(self) -> None:
        """Add the others' gradients to this process's, and drop theirs."""

    def clear(self) -> None:
        """Drop the others' gradients."""


class Loss(Protocol):
    """What a trainer wants of a loss; ``PreparedLoss`` has it."""

    @property
    def level(self) -> Level:
        """Return the level of the call."""

    @property
    def driver(self) -> Driver:
        """Name of the output that it is a function of."""

    @property
    def entropy(self) -> bool:
        """Return whether it wants entropies, too."""

    def gradient(
        self,
        logprobs: Sequence[torch.Tensor],
        data: Sequence[Datum],
        *,
        entropy: Sequence[torch.Tensor] | None = None,
        places: Sequence[int] | None = None,
    ) -> LossGradient:
        """See ``PreparedLoss.gradient``."""


class LocalTrainer:
    """A peft model, its gradient and its AdamW.

    Args:
        model: the peft model; only its adapter, and a critic's value head, have gradients.
        device: where it is.
        budget: tokens of a micro-batch.
        forward: what computes it.
        value_head: [hidden] -> 1 of a critic, which has values instead of what is read off logits.

    Attributes:
        hands: that compute with this process; None: it computes alone.
    """

    hands: Hands | None = None

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        budget: int,
        forward: TrainingForward,
        value_head: nn.Module | None = None,
    ) -> None:
        self.model = model
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.forward, self._value_head = forward, value_head
        self._device = device
        self._budget = budget
        # The fused kernel on every device, so that a run does not depend on which one torch would pick.
        self.optimizer = torch.optim.AdamW(list(self.parameters.values()), fused=True)

    def run(
        self, data: Sequence[Datum], loss: Loss | None, names: Sequence[str], *, backward: bool
    ) -> Generator[None, None, tuple[Outputs, list[LossGradient]]]:
        """Return outputs ``names`` of every datum and the loss's parts; with ``backward`` add its gradient at the end.

        Yields between micro-batches. Whatever is raised, the accumulated gradient is as it was.
        """
        earlier = [p.grad for p in self.parameters.values()]
        for p in self.parameters.values():
            p.grad = None
        try:
            outputs, parts = yield from self._all_batches(data, loss, names, backward=backward)
            if backward and self.hands is not None:
                self.hands.sum_gradients()
            gradients = [p.grad for p in self.parameters.values()]
            if backward and not _all_finite([g for g in gradients if g is not None]):
                raise BackendError("forward_backward: the gradient is not finite; it was dropped")
        except BaseException:  # a GeneratorExit, too: all of the gradient is added, or nothing
            self._set(earlier)
            if self.hands is not None:
                with contextlib.suppress(RankLost):
                    self.hands.clear()
            raise
        self._set([_sum(old, new) for old, new in zip(earlier, gradients, strict=True)])
        return outputs, parts

    def step(self, params: Adam) -> Mapping[str, float]:
        """Make one AdamW step with these settings, and clear the gradient.

        Raises:
            BackendError: the gradient's norm is not finite in float32; nothing was changed.
        """
        for p in self.parameters.values():  # a zero gradient moves by momentum, a missing one would not
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise BackendError(
                f"optim_step: the gradient's norm is {float(norm)}; nothing was changed; discard() drops it"
            )
        if params.grad_clip_norm > 0:
            clip_grads_with_norm_(self.parameters.values(), params.grad_clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = params.learning_rate
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        self.optimizer.step()
        self.clear()
        return {"grad_norm:mean": float(norm)}

    def clear(self) -> None:
        """Drop the gradient."""
        self._set([None] * len(self.parameters))

    def _set(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for p, g in zip(self.parameters.values(), gradients, strict=True):
            p.grad = g

    def _all_batches(
        self, data: Sequence[Datum], loss: Loss | None, names: Sequence[str], *, backward: bool
    ) -> Generator[None, None, tuple[Outputs, list[LossGradient]]]:
        main = "logprobs" if self._value_head is None else "values"  # which is always there
        needed = sorted({main, *names, *_needs(loss)})
        outputs: Outputs = {name: [torch.zeros(0)] * len(data) for name in needed}
        parts: list[LossGradient] = []
        pairs = loss is not None and loss.level == "pair"
        size = 1 if self.hands is None else self.hands.size
        batches = pack(data, self._budget, pairs=pairs, share=self.forward.shares, among=size)
        rounds = [batches[k : k + size] for k in range(0, len(batches), size)]
        whole: LossGradient | None = None
        if loss is not None and loss.level == "batch":  # first pass: everything that the loss wants to see at once
            for together in rounds:
                with telling(partial(self._describe, batches, together[0])):
                    self._compute(outputs, data, together, needed, gradient=False)
                yield
            whole = loss.gradient(outputs[loss.driver], data, entropy=outputs.get("entropy"))
            parts.append(whole)
            if not backward:
                return outputs, parts
        for together in rounds:
            with telling(partial(self._describe, batches, together[0])):
                flat = self._compute(outputs, data, together, needed, gradient=backward)
            if loss is not None:
                gradients = []
                for batch in together:
                    part, places = whole, list(batch.members)
                    if part is None:
                        part, places = _compute_gradient(loss, data, outputs, places), list(range(len(places)))
                        parts.append(part)
                    if backward:
                        gradients.append(_gradients_of(part, places))
                if backward:
                    with telling(partial(self._describe, batches, together[0])):
                        self._backward(flat, _needs(loss), gradients)
            del flat
            yield
        return outputs, parts

    def _describe(self, batches: Sequence[MicroBatch], batch: MicroBatch) -> str:
        """Describe a micro-batch, and what to do where it does not fit."""
        number = next(i for i, other in enumerate(batches, 1) if other is batch)
        size = f"{batch.tokens.size} tokens computed, {batch.index.size} of them trained on"
        datums = batch.members
        whose = f"of datums {min(datums)} to {max(datums)}" if len(datums) > 1 else f"of datum {datums[0]} alone"
        remedy = f"lower micro_batch_tokens ({self._budget})"
        if batch.tokens.size > self._budget:
            remedy = "shorten the longest datum, or use bfloat16 or a smaller model"
        return f"micro-batch {number} of {len(batches)}, {size}, {whose}; nothing was changed; {remedy}"

    def _compute(
        self,
        outputs: Outputs,
        data: Sequence[Datum],
        together: Sequence[MicroBatch],
        names: Sequence[str],
        *,
        gradient: bool,
    ) -> Flat:
        """Compute the micro-batches of a round, store their outputs, and return those of the first, of this process."""
        inputs = [self._inputs(data, batch, names) for batch in together]
        own = partial(self.outputs, inputs[0], gradient=gradient)
        flats = [own()] if self.hands is None else self.hands.forward(inputs[1:], own, gradient=gradient)
        for batch, flat in zip(together, flats, strict=True):
            self._store(outputs, batch, data, flat)
        return flats[0]

    def _backward(self, flat: Flat, names: Sequence[str], gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        own = partial(backpropagate, flat, names, gradients[0])
        if self.hands is None:
            own()
        else:
            self.hands.backward(gradients[1:], names, own)

    def _store(self, outputs: Outputs, batch: MicroBatch, data: Sequence[Datum], flat: Flat) -> None:
        """Split what was computed by datum; one copy brings all of it to the CPU, where losses are computed."""
        sizes = [int(data[i].mask.sum()) for i in batch.members]
        for name, values in flat.items():
            there = values.detach().to("cpu", torch.float32)
            for i, part in zip(batch.members, torch.split(there, sizes), strict=True):
                outputs[name][i] = part

    def outputs(self, inputs: Inputs, *, gradient: bool) -> Flat:
        """Return what is to be read off a micro-batch."""
        with torch.set_grad_enabled(gradient):
            if self._value_head is not None:
                return {"values": self.forward.values(inputs.batch, self._value_head)}
            return self.forward.outputs(inputs.batch, inputs.wanted, inputs.temperatures)

    def _inputs(self, data: Sequence[Datum], batch: MicroBatch, names: Sequence[str]) -> Inputs:
        if self._value_head is not None:
            return Inputs(batch, {}, None)
        chosen = [data[i] for i in batch.members]
        temperatures = np.repeat([d.temperature or 1.0 for d in chosen], [d.mask.sum() for d in chosen])
        warm = self._tensor(temperatures.astype(np.float32)) if (temperatures != 1.0).any() else None
        return Inputs(batch, {name: self._ids(name, chosen) for name in names}, warm)

    def _ids(self, name: str, data: Sequence[Datum]) -> torch.Tensor | None:
        """Return the ids that an output is about: [n] of the tokens themselves, [n, K] of targets, else none."""
        if name in DISTRIBUTION_OUTPUTS:
            return None
        arrays = [datum.tokens if name == "logprobs" else datum.inputs["target_tokens"] for datum in data]
        return self._tensor(np.concatenate([a[datum.mask] for a, datum in zip(arrays, data, strict=True)]))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(np.ascontiguousarray(array), self._device)


def _compute_gradient(loss: Loss, data: Sequence[Datum], outputs: Outputs, members: Sequence[int]) -> LossGradient:
    """Return the gradient of a loss over a micro-batch with respect to what the model computed."""
    entropy = [outputs["entropy"][i] for i in members] if loss.entropy else None
    driver = [outputs[loss.driver][i] for i in members]
    return loss.gradient(driver, [data[i] for i in members], entropy=entropy, places=members)


def _gradients_of(part: LossGradient, places: Sequence[int]) -> list[torch.Tensor]:
    """Return the gradients of what ``_needs`` names: [n] or [n, K] of all tokens of the datums at ``places``."""
    kinds = [part.driver] if part.entropy is None else [part.driver, part.entropy]
    return [torch.cat([kind[i] for i in places]) for kind in kinds]


def backpropagate(flat: Flat, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
    """Continue backwards from the gradients of outputs."""
    tensors = [flat[name] for name in names[: len(gradients)]]
    torch.autograd.backward(tensors, [g.to(x.device) for x, g in zip(tensors, gradients, strict=True)])


def _needs(loss: Loss | None) -> list[str]:
    return [] if loss is None else [loss.driver, *(["entropy"] if loss.entropy else [])]


def _all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether all numbers are finite, asking the device once: the largest magnitude is, and NaN is passed on."""
    return bool(torch.isfinite(get_total_norm(gradients, torch.inf)))


def _sum(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    return old if new is None else new if old is None else old + new
