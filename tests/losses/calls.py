"""Calls of a loss in float64, and made-up data for every loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rlkit
from rlkit import losses
from rlkit.losses import PreparedLoss, prepare, registry, with_entropy, with_kl

PAIRS = ("dpo", "orpo", "cpo", "simpo")
BATCHES = ("clip_cov", "kl_cov")
NAMES = sorted(name for name in losses.__all__ if name in registry)
SHAPES = {"datum": lambda part: part[0], "pair": tuple, "batch": list}  # what a loss of a level is called with
SCALARS = ("expert", "mu", "desirable", "kl_coef", "entropy_coef")
VARIANTS = [  # settings that take every branch of every loss; the empty ones are the defaults
    *[(name, {}) for name in NAMES],
    ("ppo", {"dual_clip": 1.3}), ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}),
    ("decoupled_ppo", {"behaviour_cap": 1.1}), ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "unified_mask": True}),
    *[(n, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}) for n in ("gspo", "gspo_token", "luspo")],
    ("gmpo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.1}),
    ("dppo_tv", {"divergence_low": 0.02, "divergence_high": 0.05, "ratio_cap": 1.2}),
    ("dppo_tv", {"divergence_low": 0.02, "divergence_high": 0.05, "squared_coef": 0.3}),
    ("dppo_kl", {"divergence_low": 0.005, "divergence_high": 0.01, "ratio_cap": 1.2}),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 0.6}), ("sapo", {"tau_pos": 2.0, "tau_neg": 0.6, "detached": True}),
    ("topr", {"threshold": 0.5}), ("opsm", {"dual_clip": 1.05}), ("mix", {"dual_clip": 1.05}),
    ("vespo", {"k_pos": 1.5, "lambda_pos": 0.5, "k_neg": 0.7, "lambda_neg": 2.5}),
    ("opsm", {"delta": 0.0}), ("opsm", {"delta": 0.02}), ("opmd", {"tau": 0.3}),
    ("rec", {"clip_mode": "one-side", "weight": "importance_sampling"}),
    ("rec", {"clip_mode": "two-side", "weight": "advantage", "temperature": 2.0, "regularizer": "k2"}),
    ("rec", {"clip_mode": "two-side", "regularizer": "k2", "regularizer_coef": 0.3}),
    ("rec", {"clip_mode": "ring", "ring_low_threshold": 0.75, "ring_high_threshold": 1.3}),
    ("rec", {"clip_mode": "one-side", "regularizer": "forward-kl", "regularizer_coef": 0.2}),
    ("clip_cov", {"fraction": 1.0, "cov_low": 0.1, "cov_high": 1.0}), ("kl_cov", {"fraction": 0.3, "coef": 0.5}),
    ("mix", {"phi": True}), ("topk_jsd", {"beta": 0.2}),
    *[("dpo", {"form": form}) for form in ("hinge", "ipo", "apo_zero", "apo_down")],
    ("dpo", {"form": "robust", "label_smoothing": 0.2}), ("dpo", {"label_smoothing": 0.2, "beta": 1.5}),
    ("dpo", {"form": "hinge", "beta": 2.0}), ("cpo", {"alpha": 0.5, "label_smoothing": 0.1}),
    ("kto", {"beta": 0.5, "desirable_weight": 0.7, "undesirable_weight": 1.4, "kl": 0.3}),
    ("value_clipped", {"clip": 0.6}), ("value_huber", {"delta": 0.7}),
]  # fmt: skip
TERMS = {  # loss, estimator and coefficient of its KL term, coefficient of its entropy; a coefficient may be an input
    "ppo+k3": ("ppo", "k3", 0.3, None), "gspo+straight_through": ("gspo", "straight_through", 0.3, None),
    "cross_entropy+ratio_corrected": ("cross_entropy", "ratio_corrected", 0.3, None),
    "dro+clamped": ("dro", "clamped", "kl_coef", None), "simpo+k2": ("simpo", "k2", 0.3, None),
    "kl_cov+abs": ("kl_cov", "abs", 0.3, None), "ppo+entropy": ("ppo", None, None, 0.2),
    "reinforce+k1+entropy": ("reinforce", "k1", 0.3, "entropy_coef"), "kl_cov+entropy": ("kl_cov", None, None, 0.2),
}  # fmt: skip
COMPOSED = {title: with_kl(name, coef, kl) if kl else name for title, (name, kl, coef, _) in TERMS.items()}
COMPOSED |= {title: with_entropy(loss, TERMS[title][3]) for title, loss in COMPOSED.items() if TERMS[title][3]}
ALL = {**{name: name for name in NAMES}, **COMPOSED}


def identity(variant):
    return "-".join([variant[0], *(f"{k}={v}" for k, v in variant[1].items())])


def tensors(values, dtype=torch.float64):
    return [torch.as_tensor(np.asarray(value)).to(dtype) for value in values]


def call(loss, driver, inputs, settings=None, dtype=torch.float64):
    """Return value, gradients and entropy's gradients of a loss called as `prepare` does, per datum and in float64.

    ``driver`` is one array per datum; ``inputs`` maps names to one array per datum, "entropy" among them.
    """
    prepared = prepare(loss, settings)
    leaves = [leaf.requires_grad_() for leaf in tensors(driver, dtype)]
    kinds = {"target_tokens": torch.int64}
    arguments = {name: tensors(values, kinds.get(name, dtype)) for name, values in inputs.items()}
    entropies = [entropy.requires_grad_() for entropy in arguments.get("entropy", [])]
    arguments[prepared.driver] = leaves
    size = {"datum": 1, "pair": 2, "batch": len(leaves)}[prepared.level]
    total = torch.zeros((), dtype=dtype)
    for i in range(0, len(leaves), size):
        part = {name: SHAPES[prepared.level](values[i : i + size]) for name, values in arguments.items()}
        result = prepared.function(**part, **prepared.settings)
        total = total + (result[0] if isinstance(result, tuple) else result)
    gradients = torch.autograd.grad(total, [*leaves, *entropies], allow_unused=True, materialize_grads=True)
    found = [gradient.numpy() for gradient in gradients]
    return total.item(), found[: len(leaves)], found[len(leaves) :]


def needs(loss, settings=None, *, optional=("weights", "mu", "target_tokens")):
    """Return the driver of a loss, and its inputs: those it needs, and these optional ones if it has them."""
    prepared = prepare(loss, settings)
    extra = ("entropy",) if prepared.entropy else ()
    return prepared.driver, (*prepared.inputs, *(name for name in prepared.optional if name in optional), *extra)


def draw_targets(rng, n):
    return np.log(rng.dirichlet(np.ones(5), n)[:, :4])


MADE = {  # other inputs are logprobs near the driver's
    **dict.fromkeys(("values", "returns", "old_values"), lambda rng, n: rng.normal(0, 1, n)),
    **dict.fromkeys(("expert", "desirable"), lambda rng, n: float(rng.integers(2))),
    **dict.fromkeys(("target_logprobs", "teacher_logprobs"), draw_targets),
    "target_tokens": lambda rng, n: np.where(rng.random((n, 4)) < 0.3, -1, rng.integers(0, 9, (n, 4))),
    "advantages": lambda rng, n: rng.normal(0.1, 1, n), "weights": lambda rng, n: rng.uniform(0.2, 2, n),
    "entropy": lambda rng, n: rng.uniform(0.1, 2, n), "mu": lambda rng, n: 0.3,
    "kl_coef": lambda rng, n: 0.4, "entropy_coef": lambda rng, n: 0.25,
}  # fmt: skip


def example(loss, rng, sizes=(5, 3, 1, 6), *, spread=0.3, **options):
    """Return a made-up driver and inputs for a loss, one array per datum."""
    driver_name, names = needs(loss, **options)
    driver, inputs = [], {name: [] for name in names}
    for n in sizes:
        lp = np.minimum(-rng.exponential(1.2, n), -0.02)
        driver.append(MADE[driver_name](rng, n) if driver_name in MADE else lp)
        for name in names:
            made = MADE[name](rng, n) if name in MADE else np.minimum(lp + rng.normal(0, spread, n), -0.01)
            inputs[name].append(made)
    return driver, inputs


def datums(driver, inputs):
    """Return datums with these inputs after a prompt of two tokens, and the driver as float32 tensors."""
    data = []
    for i, x in enumerate(driver):
        own = {name: values[i] for name, values in inputs.items() if name != "entropy"}
        data.append(rlkit.Datum(range(1, len(x) + 3), [0, 0] + [1] * len(x), own))
    return data, tensors(driver, torch.float32)


def gradient(loss, driver, inputs):
    """Return what a backend gets of a loss, by name, as a function or prepared: checked, tried out, in float32."""
    prepared = loss if isinstance(loss, PreparedLoss) else prepare(loss)
    data, leaves = datums(driver, inputs)
    prepared.check(data)
    prepared.try_out(data)
    entropy = tensors(inputs["entropy"], torch.float32) if "entropy" in inputs else None
    return prepared.gradient(leaves, data, entropy=entropy)


def close(a, b, tolerance=1e-5):
    """Assert that two gradients of a loss are the same."""
    assert a.value == pytest.approx(b.value, rel=tolerance, abs=tolerance)
    for x, y in zip([*a.driver, *(a.entropy or [])], [*b.driver, *(b.entropy or [])], strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
