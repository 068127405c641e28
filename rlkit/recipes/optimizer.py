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
    """AdamW by step, as section algorithm.optimizer has it; ``grad_clip`` counts where that has no clip."""

    settings: Optimizer
    grad_clip: float
    total: int

    def adam(self, step: int, base: float | None = None) -> Adam:
        """Return the optimizer of a step; ``base`` takes the place of the section's learning rate (a critic's)."""
        settings = self.settings
        rate = self.rate(step)
        if base is not None and settings.lr:
            rate *= base / settings.lr
        clip = self.grad_clip if settings.clip_grad is None else settings.clip_grad
        beta1, beta2 = settings.betas
        return Adam(rate, beta1, beta2, eps=settings.eps, weight_decay=settings.weight_decay, grad_clip_norm=clip)

    def rate(self, step: int) -> float:
        """Return the learning rate: a warm-up, then constant, or falling to lr min_lr_ratio at the last step."""
        settings = self.settings
        kind = settings.warmup_style or settings.lr_scheduler_type
        warm = (
            settings.lr_warmup_steps
            if settings.lr_warmup_steps >= 0
            else math.floor(settings.lr_warmup_steps_ratio * self.total)
        )
        if step < warm:
            return settings.lr * schedules.warmup(step, steps=warm)
        if kind == "constant":
            return settings.lr
        fall = schedules.cosine if kind == "cosine" else schedules.linear
        return fall(
            step - warm, start=settings.lr, end=settings.lr * settings.min_lr_ratio, steps=max(self.total - warm, 1)
        )
