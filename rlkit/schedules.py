"""Schedules: pure functions of the step, for learning rates and for coefficients.

Steps count from 0. A schedule is called at each step (``Adam(learning_rate=cosine(step, ...))``), so that it has no
state to save. Schedules are multiplied and added like the numbers they return.
"""

from __future__ import annotations

import math

from rlkit import _check
from rlkit.errors import ConfigError

__all__ = ["chord_schedule", "constant", "cosine", "linear", "lr_for", "warmup", "wsd"]

_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}


def constant(step: int, *, value: float) -> float:
    """Return the same value at every step.

    Args:
        step: >= 0.
        value: finite.

    Raises:
        ConfigError: step or value is out of range.

    >>> constant(7, value=1e-4)
    0.0001
    """
    _check.integer("step", step, low=0)
    return _check.real("value", value)


def linear(step: int, *, start: float, end: float, steps: int) -> float:
    """Return a straight line from start at step 0 to end at step ``steps``, and end from then on.

    Args:
        step: >= 0.
        start, end: finite.
        steps: >= 1.

    Raises:
        ConfigError: an argument is out of range.

    >>> [linear(step, start=1.0, end=0.0, steps=4) for step in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    part = _compute_progress(step, steps)
    return _check.real("start", start) * (1.0 - part) + _check.real("end", end) * part


def cosine(step: int, *, start: float, end: float = 0.0, steps: int) -> float:
    """Return half a cosine from start at step 0 to end at step ``steps``, and end from then on.

    end + (start - end) (1 + cos(pi step / steps)) / 2

    Args:
        step: >= 0.
        start, end: finite.
        steps: >= 1.

    Raises:
        ConfigError: an argument is out of range.

    >>> [round(cosine(step, start=1.0, steps=4), 6) for step in (0, 1, 2, 4, 9)]
    [1.0, 0.853553, 0.5, 0.0, 0.0]

    Source: SGDR, arXiv:1608.03983, equation 5, without restarts.
    """
    part = _compute_progress(step, steps)
    start, end = _check.real("start", start), _check.real("end", end)
    return end if part == 1.0 else end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * part))


def warmup(step: int, *, steps: int) -> float:
    """Return a factor for another schedule that rises to 1: min((step + 1) / steps, 1).

    Args:
        step: >= 0. The first step already moves, where step / steps would waste it.
        steps: >= 0; 0 and 1 are no warm-up.

    Raises:
        ConfigError: an argument is out of range.

    >>> [warmup(step, steps=4) * constant(step, value=2.0) for step in (0, 1, 3, 9)]
    [0.5, 1.0, 2.0, 2.0]
    """
    step = _check.integer("step", step, low=0)
    return min((step + 1) / max(_check.integer("steps", steps, low=0), 1), 1.0)


def wsd(step: int, *, peak: float, steps: int, warmup_steps: int = 0, decay_steps: int, end: float = 0.0) -> float:
    """Return a warm-up, a plateau at peak, and a straight line to end over the last ``decay_steps`` of ``steps``.

    Args:
        step: >= 0.
        peak, end: finite.
        steps: >= 1, the whole run; end from then on.
        warmup_steps: >= 0, as for ``warmup``.
        decay_steps: >= 0; together with warmup_steps at most ``steps``.

    Raises:
        ConfigError: an argument is out of range, or warm-up and decay overlap.

    >>> [wsd(step, peak=1.0, steps=10, warmup_steps=2, decay_steps=4) for step in (0, 1, 6, 8, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]

    Source: MiniCPM, arXiv:2404.06395, section 4. Peers: the decay is also drawn as a square root or exponential.
    """
    step = _check.integer("step", step, low=0)
    peak, end = _check.real("peak", peak), _check.real("end", end)
    steps = _check.integer("steps", steps, low=1)
    warmup_steps = _check.integer("warmup_steps", warmup_steps, low=0, high=steps)
    why = f"warmup_steps={warmup_steps} and decay_steps share steps={steps}"
    decay_steps = _check.integer("decay_steps", decay_steps, low=0, high=steps - warmup_steps, why=why)
    if step >= steps:
        return end
    if step < warmup_steps:
        return peak * warmup(step, steps=warmup_steps)
    if step < steps - decay_steps:
        return peak
    return linear(step - (steps - decay_steps), start=peak, end=end, steps=decay_steps)


def chord_schedule(step: int, *, warmup_steps: int, decay_steps: int, peak: float = 0.9, valley: float = 0.05) -> float:
    """Return the share of the supervised loss in CHORD: up to peak in a straight line, then down to valley by a cosine.

    peak step / warmup_steps, then valley + (peak - valley) (1 + cos(pi (step - warmup_steps) / decay_steps)) / 2

    Args:
        step: >= 0.
        warmup_steps, decay_steps: >= 0.
        peak, valley: in [0, 1].

    Raises:
        ConfigError: an argument is out of range.

    >>> [round(chord_schedule(step, warmup_steps=10, decay_steps=30), 6) for step in (0, 5, 10, 25, 40, 99)]
    [0.0, 0.45, 0.9, 0.475, 0.05, 0.05]

    Source: CHORD, arXiv:2508.11408. Peers: Trinity's mu_schedule_function.
    """
    step = _check.integer("step", step, low=0)
    warmup_steps = _check.integer("warmup_steps", warmup_steps, low=0)
    decay_steps = _check.integer("decay_steps", decay_steps, low=0)
    peak, valley = _check.real("peak", peak, low=0.0, high=1.0), _check.real("valley", valley, low=0.0, high=1.0)
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= warmup_steps + decay_steps:
        return valley
    return cosine(step - warmup_steps, start=peak, end=valley, steps=decay_steps)


def lr_for(model: object, *, hidden_size: int, lora: bool = True) -> float:
    """Return a first guess at Adam's learning rate for a model, to start a search from.

    5e-5 (2000 / hidden_size)^p, ten times that with LoRA; p = 0.781 for Llama, 0.0775 for Qwen

    Args:
        model: a name that contains "llama" or "qwen"; others are not supported.
        hidden_size: >= 1, as in the model's configuration.
        lora: whether a LoRA is trained, instead of all weights.

    Raises:
        ConfigError: the model is of neither family, or an argument is out of range.

    >>> lr_for("meta-llama/Llama-3.2-1B", hidden_size=2000), lr_for("Qwen/Qwen3-8B", hidden_size=2000, lora=False)
    (0.0005, 5e-05)

    Source: get_lr of tinker-cookbook (until early 2026; fitted to supervised fine-tuning), and "LoRA without regret"
    (Thinking Machines Lab, 2025) for the factor 10. Peers: later versions of get_lr hold a table of measured rates for
    the models that Tinker serves, between 1e-4 and 1e-3.
    """
    hidden_size = _check.integer("hidden_size", hidden_size, low=1)
    lora = _check.flag("lora", lora)
    families = [family for family in _EXPONENTS if isinstance(model, str) and family in model.lower()]
    if not families:
        expected = "a name that contains " + " or ".join(map(repr, _EXPONENTS))
        raise ConfigError("model", f"got {_check.describe(model)}", expected, "others were not measured")
    return 5e-5 * (10.0 if lora else 1.0) * math.pow(2000 / hidden_size, _EXPONENTS[families[0]])


def _compute_progress(step: int, steps: int) -> float:
    """Return the share of ``steps`` that has passed, in [0, 1]."""
    return min(_check.integer("step", step, low=0) / _check.integer("steps", steps, low=1), 1.0)
