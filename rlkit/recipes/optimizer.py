"""The optimizer's steps: AdamW with a schedule of its learning rate."""

from __future__ import annotations

import math

import attrs

from rlkit import schedules
from rlkit.recipes.learning import Optimizer
from rlkit.types import Adam

__all__ = ["Schedule"]


@attrs.frozen
class Schedule:
    """AdamW by step.

    Attributes:
        settings: section algorithm.optimizer.
        grad_clip: its clip, unless the section has one.
        total: steps of the run.
    """

    settings: Optimizer
    grad_clip: float
    total: int

    def adam(self, step: int, base: float | None = None) -> Adam:
        """Return the optimizer of a step; ``base`` takes the place of the section's learning rate (a critic's)."""
        own = self.settings
        rate = self.rate(step)
        if base is not None and own.lr:
            rate *= base / own.lr
        clip = self.grad_clip if own.clip_grad is None else own.clip_grad
        beta1, beta2 = own.betas
        return Adam(rate, beta1, beta2, eps=own.eps, weight_decay=own.weight_decay, grad_clip_norm=clip)

    def rate(self, step: int) -> float:
        """Return the learning rate: a warm-up, then constant, or falling to lr min_lr_ratio at the last step."""
        own = self.settings
        kind = own.warmup_style or own.lr_scheduler_type
        warm = own.lr_warmup_steps if own.lr_warmup_steps >= 0 else math.floor(own.lr_warmup_steps_ratio * self.total)
        if step < warm:
            return own.lr * schedules.warmup(step, steps=warm)
        if kind == "constant":
            return own.lr
        fall = schedules.cosine if kind == "cosine" else schedules.linear
        return fall(step - warm, start=own.lr, end=own.lr * own.min_lr_ratio, steps=max(self.total - warm, 1))
