"""Gradients and optimizer steps of the adapter."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlkit.backends.checking import OF_DISTRIBUTION
from rlkit.backends.local.training.head import Head
from rlkit.backends.local.training.micro_batches import Batch, pack
from rlkit.backends.memory import telling
from rlkit.errors import BackendError
from rlkit.types import Adam, Datum

if TYPE_CHECKING:
    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = ["Outputs", "Trainer"]

Outputs = dict[str, list[torch.Tensor]]  # name -> one tensor per datum


class Trainer:
    """A peft model, its gradient and its AdamW.

    Args:
        model: the peft model; only its adapter has gradients.
        device: where it is.
        budget: tokens of a micro-batch.
        head: what runs the model and reads it.
    """

    def __init__(self, model: Any, device: torch.device, budget: int, head: Head) -> None:
        self.model = model
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._head = head
        self._device = device
        self._budget = budget
        # The fused kernel on every device, so that a run does not depend on which one torch would pick.
        self.optimizer = torch.optim.AdamW(list(self.parameters.values()), fused=True)

    def run(
        self, data: Sequence[Datum], loss: PreparedLoss | None, names: Sequence[str], *, backward: bool
    ) -> Generator[None, None, tuple[Outputs, list[LossGradient]]]:
        """Outputs ``names`` of every datum, and the loss's parts; with ``backward`` its gradient is added at the end.

        Yields between micro-batches. Whatever is raised, the accumulated gradient is as it was.
        """
        earlier = [p.grad for p in self.parameters.values()]
        for p in self.parameters.values():
            p.grad = None
        try:
            outputs, parts = yield from self._all_batches(data, loss, names, backward=backward)
            gradients = [p.grad for p in self.parameters.values()]
            if backward and not all(g is None or bool(torch.isfinite(g).all()) for g in gradients):
                raise BackendError("forward_backward: the gradient is not finite; it was dropped")
        except BaseException:
            self._set(earlier)
            raise
        self._set([_sum(old, new) for old, new in zip(earlier, gradients, strict=True)])
        return outputs, parts

    def step(self, params: Adam) -> Mapping[str, float]:
        """One AdamW step with these settings; the gradient is cleared.

        Raises:
            BackendError: the gradient's norm is not finite in float32; nothing was changed.
        """
        for p in self.parameters.values():  # a zero gradient moves by momentum, a missing one would not
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        if not torch.isfinite(norm):
            raise BackendError(
                f"optim_step: the gradient's norm is {float(norm)}; nothing was changed, discard() drops it"
            )
        if params.grad_clip_norm > 0:
            scale = (params.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
            for g in gradients:
                g.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = params.learning_rate
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        self.optimizer.step()
        self.clear()
        return {"grad_norm:mean": float(norm)}

    def clear(self) -> None:
        """Drops the gradient."""
        self._set([None] * len(self.parameters))

    def _set(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for p, g in zip(self.parameters.values(), gradients, strict=True):
            p.grad = g

    def _all_batches(
        self, data: Sequence[Datum], loss: PreparedLoss | None, names: Sequence[str], *, backward: bool
    ) -> Generator[None, None, tuple[Outputs, list[LossGradient]]]:
        needed = sorted({self._head.main, *names, *_needs(loss)})
        outputs: Outputs = {name: [torch.zeros(0)] * len(data) for name in needed}
        parts: list[LossGradient] = []
        pairs = loss is not None and loss.level == "pair"
        self._head.body.prepare()
        batches = pack(data, self._budget, pairs=pairs, share=self._head.body.shares)
        whole: LossGradient | None = None
        if loss is not None and loss.level == "batch":  # first pass: everything that the loss wants to see at once
            for batch in batches:
                with telling(partial(self._told, batches, batch)):
                    self._keep(outputs, batch, data, self._forward(data, batch, needed, gradient=False))
                yield
            whole = loss.gradient(outputs[loss.driver], data, entropy=outputs.get("entropy"))
            parts.append(whole)
            if not backward:
                return outputs, parts
        for batch in batches:
            with telling(partial(self._told, batches, batch)):
                flat = self._forward(data, batch, needed, gradient=backward)
                self._keep(outputs, batch, data, flat)
            if loss is not None:
                found = whole
                if found is None:
                    chosen = [data[i] for i in batch.members]
                    entropy = [outputs["entropy"][i] for i in batch.members] if loss.entropy else None
                    found = loss.gradient([outputs[loss.driver][i] for i in batch.members], chosen, entropy=entropy)
                    parts.append(found)
                if backward:
                    places = range(len(batch.members)) if whole is None else batch.members
                    with telling(partial(self._told, batches, batch)):
                        self._backward(flat, loss, found, places)
            del flat
            yield
        return outputs, parts

    def _told(self, batches: Sequence[Batch], batch: Batch) -> str:
        """What a micro-batch is made of, and what to do where it does not fit."""
        number = next(i for i, other in enumerate(batches, 1) if other is batch)
        size = f"{batch.tokens.size} tokens computed, {batch.index.size} of them trained on"
        if len(batch.members) > 1:
            whose = f"of datums {min(batch.members)} to {max(batch.members)}"
            remedy = f"lower micro_batch_tokens ({self._budget})"
        else:
            whose = f"of datum {batch.members[0]} alone"
            remedy = "a datum cannot be cut: shorten it, or use bfloat16 or a smaller model"
        return f"micro-batch {number} of {len(batches)}, {size}, {whose}; nothing was changed; {remedy}"

    def _backward(
        self, flat: Mapping[str, torch.Tensor], loss: PreparedLoss, found: LossGradient, places: Sequence[int]
    ) -> None:
        tensors, gradients = [flat[loss.driver]], [torch.cat([found.driver[i] for i in places])]
        if found.entropy is not None:
            tensors.append(flat["entropy"])
            gradients.append(torch.cat([found.entropy[i] for i in places]))
        torch.autograd.backward(tensors, [g.to(t.device) for t, g in zip(tensors, gradients, strict=True)])

    def _keep(self, outputs: Outputs, batch: Batch, data: Sequence[Datum], flat: Mapping[str, torch.Tensor]) -> None:
        sizes = [int(data[i].mask.sum()) for i in batch.members]
        for name, values in flat.items():
            for i, part in zip(batch.members, torch.split(values.detach(), sizes), strict=True):
                outputs[name][i] = part

    def _forward(
        self, data: Sequence[Datum], batch: Batch, names: Sequence[str], *, gradient: bool
    ) -> dict[str, torch.Tensor]:
        """Flat outputs [n] or [n, K] of all masked-in tokens of the batch, in the order of its members."""
        chosen = [data[i] for i in batch.members]
        temperatures = np.repeat([d.temperature or 1.0 for d in chosen], [d.mask.sum() for d in chosen])
        warm = self._tensor(temperatures.astype(np.float32)) if (temperatures != 1.0).any() else None
        wanted = {name: self._ids(name, chosen) for name in names}
        with torch.set_grad_enabled(gradient):
            return self._head.outputs(batch, wanted, warm)

    def _ids(self, name: str, data: Sequence[Datum]) -> torch.Tensor | None:
        """The ids that an output is about: [n] of the tokens themselves, [n, K] of targets, else none."""
        if name == "values" or name in OF_DISTRIBUTION:
            return None
        arrays = [datum.tokens if name == "logprobs" else datum.inputs["target_tokens"] for datum in data]
        return self._tensor(np.concatenate([a[datum.mask] for a, datum in zip(arrays, data, strict=True)]))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _needs(loss: PreparedLoss | None) -> list[str]:
    return [] if loss is None else [loss.driver, *(["entropy"] if loss.entropy else [])]


def _sum(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    return old if new is None else new if old is None else old + new
