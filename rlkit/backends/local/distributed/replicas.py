"""What keeps the ranks' adapters the same to the bit: gradients summed over ranks, one start, and a checksum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
import torch.distributed as dist

from rlkit.backends.local.training.trainer import LocalTrainer
from rlkit.types import Adam

__all__ = ["Replicas"]

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@attrs.frozen(eq=False)
class Replicas:
    """One trainer of several that are the same.

    Attributes:
        trainer: this rank's.
        group: of the ranks.
        device: where what travels lies: a CPU for gloo, this rank's GPU for NCCL.
    """

    trainer: LocalTrainer
    group: dist.ProcessGroup
    device: torch.device

    def step(self, params: Adam) -> Mapping[str, float]:
        """Sum the gradient over ranks, and make one step with it; where that raises, all is as it was."""
        parameters = list(self.trainer.parameters.values())
        own = [p.grad for p in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = _flat(gradients).to(self.device)
        dist.all_reduce(flat, group=self.group)  # adds in an order that the number of ranks alone decides
        for p, summed in zip(parameters, _pieces(flat, gradients), strict=True):
            p.grad = summed
        try:
            return self.trainer.step(params)
        except BaseException:
            for p, gradient in zip(parameters, own, strict=True):
                p.grad = gradient
            raise

    def share(self, *, optimizer: bool) -> None:
        """Send rank 0's adapter, with its optimizer's state, to all; called on every rank."""
        parameters = list(self.trainer.parameters.values())
        targets = [p.data for p in parameters]
        states = self.trainer.optimizer.state
        if optimizer:
            for p in parameters:
                if p not in states:
                    step = torch.zeros((), dtype=torch.float32, device=p.device)
                    states[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p), "step": step}
            targets += [states[p][name] for p in parameters for name in _MOMENTS]
        flat = _flat(targets).to(self.device)
        dist.broadcast(flat, 0, group=self.group)
        for target, piece in zip(targets, _pieces(flat, targets), strict=True):
            target.copy_(piece)

    @property
    def checksum(self) -> int:
        """A number that two adapters have in common only if they are the same, as good as always."""
        bits = [p.detach().view(torch.int32).sum(dtype=torch.int64) for p in self.trainer.parameters.values()]
        return sum(k * int(x) for k, x in enumerate(torch.stack(bits).tolist(), 1)) % 2**63


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.detach().reshape(-1).float() for x in tensors])


def _pieces(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [x.numel() for x in like])
    return [part.view(x.shape).to(x.device) for part, x in zip(parts, like, strict=True)]
