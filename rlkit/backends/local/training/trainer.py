"""Gradients and optimizer steps of the adapter."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlkit.backends._memory import telling
from rlkit.backends.local.model.forward import Forward
from rlkit.backends.local.model.memory import to_device
from rlkit.backends.local.training.micro_batches import MicroBatch, pack
from rlkit.backends.trainer import DISTRIBUTION_OUTPUTS
from rlkit.errors import BackendError
from rlkit.types import Adam, Datum

if TYPE_CHECKING:
    from rlkit.losses.prepare import Driver, Level, LossGradient

__all__ = ["LocalTrainer", "Loss", "Outputs"]

Outputs = dict[str, list[torch.Tensor]]  # name -> one float32 tensor per datum, on the CPU


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
    """

    def __init__(
        self, model: nn.Module, device: torch.device, budget: int, forward: Forward, value_head: nn.Module | None = None
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
            gradients = [p.grad for p in self.parameters.values()]
            if backward and not _all_finite([g for g in gradients if g is not None]):
                raise BackendError("forward_backward: the gradient is not finite; it was dropped")
        except BaseException:  # a GeneratorExit, too: all of the gradient is added, or nothing
            self._set(earlier)
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
        self.forward.prepare()
        batches = pack(data, self._budget, pairs=pairs, share=self.forward.shares, chunked=self.forward.chunked)
        whole: LossGradient | None = None
        if loss is not None and loss.level == "batch":  # first pass: everything that the loss wants to see at once
            for batch in batches:
                with telling(partial(self._describe, batches, batch)):
                    self._store(outputs, batch, data, self._outputs(data, batch, needed, gradient=False))
                yield
            whole = loss.gradient(outputs[loss.driver], data, entropy=outputs.get("entropy"))
            parts.append(whole)
            if not backward:
                return outputs, parts
        for batch in batches:
            with telling(partial(self._describe, batches, batch)):
                flat = self._outputs(data, batch, needed, gradient=backward)
                self._store(outputs, batch, data, flat)
            if loss is not None:
                part = whole
                if part is None:
                    part = _compute_gradient(loss, data, outputs, batch.members)
                    parts.append(part)
                if backward:
                    places = range(len(batch.members)) if whole is None else batch.members
                    with telling(partial(self._describe, batches, batch)):
                        self._backward(flat, loss, part, places)
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
        if batch.tokens.size > self._budget and self.forward.chunked:
            remedy += ", give offload_folder=, or shorten the longest datum"
        elif len(datums) == 1 and not self.forward.chunked:
            remedy = "this architecture cannot split a datum: shorten it, or use bfloat16 or a smaller model"
        return f"micro-batch {number} of {len(batches)}, {size}, {whose}; nothing was changed; {remedy}"

    def _backward(
        self, flat: Mapping[str, torch.Tensor], loss: Loss, part: LossGradient, places: Sequence[int]
    ) -> None:
        tensors, gradients = [flat[loss.driver]], [torch.cat([part.driver[i] for i in places])]
        if part.entropy is not None:
            tensors.append(flat["entropy"])
            gradients.append(torch.cat([part.entropy[i] for i in places]))
        torch.autograd.backward(tensors, [g.to(t.device) for t, g in zip(tensors, gradients, strict=True)])

    def _store(
        self, outputs: Outputs, batch: MicroBatch, data: Sequence[Datum], flat: Mapping[str, torch.Tensor]
    ) -> None:
        """Split what was computed by datum; one copy brings all of it to the CPU, where losses are computed."""
        sizes = [int(data[i].mask.sum()) for i in batch.members]
        for name, values in flat.items():
            there = values.detach().to("cpu", torch.float32)
            for i, part in zip(batch.members, torch.split(there, sizes), strict=True):
                outputs[name][i] = part

    def _outputs(
        self, data: Sequence[Datum], batch: MicroBatch, names: Sequence[str], *, gradient: bool
    ) -> dict[str, torch.Tensor]:
        """Return flat outputs [n] or [n, K] of all masked-in tokens of the batch, in the order of its members."""
        with torch.set_grad_enabled(gradient):
            if self._value_head is not None:
                return {"values": self.forward.values(batch, self._value_head)}
            chosen = [data[i] for i in batch.members]
            temperatures = np.repeat([d.temperature or 1.0 for d in chosen], [d.mask.sum() for d in chosen])
            warm = self._tensor(temperatures.astype(np.float32)) if (temperatures != 1.0).any() else None
            return self.forward.outputs(batch, {name: self._ids(name, chosen) for name in names}, warm)

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


def _needs(loss: Loss | None) -> list[str]:
    return [] if loss is None else [loss.driver, *(["entropy"] if loss.entropy else [])]


def _all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether all numbers are finite, asking the device once: the largest magnitude is, and NaN is passed on."""
    return bool(torch.isfinite(get_total_norm(gradients, torch.inf)))


def _sum(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    return old if new is None else new if old is None else old + new
