"""The API's losses again, in float64 numpy, as functions of the weights of the exact model."""

from __future__ import annotations

import numpy as np

from rlkit.backends.toy import Features

FEATURES = Features(259)


def logprobs(weights, tokens, targets):
    """float64, shaped like targets."""
    logits = FEATURES.all(np.asarray(tokens)) @ weights
    logits = logits - logits.max(-1, keepdims=True)
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = np.arange(len(tokens)).reshape(-1, *[1] * (np.ndim(targets) - 1))
    return table[rows, targets]


def loss(name, config, weights, start, data):
    """The sum over datums. ``start`` are the weights at which what is not differentiated is taken."""
    return sum(_one(name, config, weights, start, *datum) for datum in data)


def _one(name, config, weights, start, tokens, targets, inputs):
    lp, frozen = logprobs(weights, tokens, targets), logprobs(start, tokens, targets)
    x = {key: np.asarray(value, np.float64) for key, value in inputs.items()}
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    if name == "cross_entropy":
        return -(x.get("weights", 1.0) * lp).sum()
    q, a = x["logprobs"], x["advantages"]
    if name == "importance_sampling":
        return -(np.exp(lp - q) * a).sum()
    if name == "dro":
        return -(lp * a - config.get("beta", 0.05) / 2 * (lp - q) ** 2).sum()
    if name == "cispo":
        low, high = 0.0 if low is None else low, 4.0 if high is None else high
        return -(np.clip(np.exp(frozen - q), low, high) * lp * a).sum()
    if name in ("ppo", "gspo"):
        low, high = 0.8 if low is None else low, 1.2 if high is None else high
        ratio = np.exp(lp - q)
    if name == "gspo":
        mask = x["sequence_ratio_mask"]
        ratio = np.exp((mask * (frozen - q)).sum() / mask.sum() + lp - frozen)
    return -np.minimum(ratio * a, np.clip(ratio, low, high) * a).sum()


def slope(name, config, weights, data, direction, h=1e-5):
    """The derivative along ``direction``, by a central difference."""
    ahead = loss(name, config, weights + h * direction, weights, data)
    behind = loss(name, config, weights - h * direction, weights, data)
    return (ahead - behind) / (2 * h)
