"""Settings of the losses: every default pinned, every number out of range refused by name."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest

from rlkit import ConfigError
from rlkit.losses import kl, prepare, registry, with_entropy, with_kl
from tests.each import for_each
from tests.losses.calls import NAMES, call, example

PPO = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
GSPO = {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}
DEFAULTS = {
    "reinforce": {},
    "importance_sampling": {},
    "ppo": {**PPO, "dual_clip": None},
    "decoupled_ppo": {**PPO, "behaviour_cap": None},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0, "unified_mask": False},
    "gspo": GSPO,
    "gspo_token": GSPO,
    "luspo": GSPO,
    "gmpo": {"clip_low_threshold": math.exp(-0.4), "clip_high_threshold": math.exp(0.4)},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05, "detached": False},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "dppo_tv": {"divergence_low": 0.2, "divergence_high": 0.2, "ratio_cap": 20.0, "squared_coef": 0.0},
    "dppo_kl": {"divergence_low": 0.05, "divergence_high": 0.05, "ratio_cap": 20.0},
    "dro": {"beta": 0.05},
    "topr": {"threshold": 0.0},
    "sppo": {"clip_low_threshold": 1 / 1.3, "clip_high_threshold": 1.3},
    "rec": {
        "clip_mode": "none",
        "weight": "none",
        **PPO,
        "ring_low_threshold": 0.4,
        "ring_high_threshold": 3.0,
        "temperature": 1.0,
        "regularizer": "none",
        "regularizer_coef": 0.0,
    },
    "opmd": {"tau": 1.0},
    "opsm": {"delta": 0.1, **PPO, "dual_clip": None},
    "clip_cov": {"fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0, **PPO, "seed": 0},
    "kl_cov": {"fraction": 2e-4, "coef": 1.0},
    "cross_entropy": {},
    "sft_is": {},
    "sft_phi": {},
    "mix": {**PPO, "dual_clip": None, "phi": False},
    "topk_forward_kl": {},
    "topk_reverse_kl": {},
    "topk_jsd": {"beta": 0.5},
    "dpo": {"form": "sigmoid", "beta": 0.1, "label_smoothing": 0.0},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "kl": 0.0},
    "orpo": {"beta": 0.1, "alpha": 1.0},
    "cpo": {"beta": 0.1, "alpha": 1.0, "label_smoothing": 0.0},
    "simpo": {"beta": 2.0, "gamma": 0.5},
    "value_clipped": {"clip": 0.2},
    "value_huber": {"delta": 10.0},
}
LEVELS = {
    **dict.fromkeys(("dpo", "orpo", "cpo", "simpo"), ("pair", False)),
    **dict.fromkeys(("clip_cov", "kl_cov"), ("batch", False)),
    **dict.fromkeys(("gspo", "gspo_token", "luspo", "gmpo", "vespo", "opsm", "kto"), ("datum", False)),
}


@for_each("name", sorted(DEFAULTS))
def test_defaults(name):
    """The settings of a loss, their order and their defaults; its level; weights are 1 by default."""
    prepared = prepare(name)
    assert list(prepared.settings.items()) == list(DEFAULTS[name].items())
    assert (prepared.level, prepared.elementwise) == LEVELS.get(name, ("datum", True))
    assert prepared.optional["weights"] == 1.0
    assert not prepared.entropy


def test_all_losses_are_here():
    added, gone = sorted(set(NAMES) - set(DEFAULTS)), sorted(set(DEFAULTS) - set(NAMES))
    assert not added, f"write down the default settings of {', '.join(added)} in DEFAULTS, above"
    assert not gone, f"{', '.join(gone)}: in DEFAULTS, but no loss of rlkit.losses.__all__"


def test_defaults_of_the_rest():
    """Estimators, compositions, and the share of the expert in a mixture."""
    assert prepare("mix").optional["mu"] == 0.1
    found = {name: parameter.default for name, parameter in inspect.signature(kl.clamped).parameters.items()}
    assert (found["log_ratio_bound"], found["value_bound"]) == (20.0, 10.0)
    assert prepare(with_kl("reinforce")).settings == {"kl_coef": 0.01}
    assert inspect.signature(with_kl).parameters["estimator"].default == "k3"
    assert prepare(with_entropy("reinforce")).settings == {"entropy_coef": 0.01}


@for_each("name", NAMES)
def test_every_loss_says_what_it_is(name):
    """A formula, its arguments, an example, and what it raises where it has settings."""
    text = inspect.getdoc(registry[name])
    first = text.partition("\n")[0]
    assert len(first) > 20
    assert "=" in text or "-sum" in first
    for part in ("Args:", ">>> ", *(["Raises:"] if DEFAULTS.get(name) and name != "dro" else [])):
        assert part in text, f"{name} lacks {part}"
    assert "Source: " in text or name == "cross_entropy"
    for parameter in inspect.signature(registry[name]).parameters:
        assert parameter in text.partition("Args:")[2] or parameter == "weights"


NUMBERS = [(name, key) for name, known in DEFAULTS.items() for key, value in known.items() if isinstance(value, float)]
OPTIONAL = [*[(name, "dual_clip") for name in ("ppo", "opsm", "mix")], ("decoupled_ppo", "behaviour_cap")]
RING = {"clip_mode": "ring"}
BAD = [
    *[
        (name, {key: bad}, key)
        for name, key in [*NUMBERS, *OPTIONAL]
        for bad in (float("nan"), float("inf"), True, "1")
    ],
    *[
        (n, {"clip_low_threshold": 1.3, "clip_high_threshold": 1.2}, "clip_low_threshold")
        for n in DEFAULTS
        if "clip_low_threshold" in DEFAULTS[n]
    ],
    *[
        (n, bounds, next(iter(bounds)))
        for n in DEFAULTS
        if "clip_low_threshold" in DEFAULTS[n]
        for bounds in ({"clip_high_threshold": 0.2, "clip_low_threshold": 0.2}, {"clip_high_threshold": 0.28})
    ],
    *[(n, {"clip_low_threshold": -0.1}, "clip_low_threshold") for n in DEFAULTS if "clip_low_threshold" in DEFAULTS[n]],
    *[
        (n, {"clip_low_threshold": -0.3, "clip_high_threshold": -0.1}, "clip_low_threshold")
        for n in ("ppo", "gspo", "gmpo")
    ],
    ("ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": -0.1}, "clip_high_threshold"),
    *[(name, {"dual_clip": bad}, "dual_clip") for name in ("ppo", "opsm", "mix") for bad in (1.0, 0.5)],
    ("decoupled_ppo", {"behaviour_cap": 0.0}, "behaviour_cap"),
    ("gmpo", {"clip_low_threshold": 0.0}, "clip_low_threshold"),
    ("sapo", {"tau_pos": 0.0}, "tau_pos"),
    ("sapo", {"tau_neg": 0.0}, "tau_neg"),
    ("vespo", {"k_pos": -1.0}, "k_pos"),
    ("vespo", {"k_neg": -1.0}, "k_neg"),
    ("vespo", {"lambda_pos": 0.0}, "lambda_pos"),
    ("vespo", {"lambda_neg": 0.0}, "lambda_neg"),
    *[
        (name, {key: bad}, key)
        for name in ("dppo_tv", "dppo_kl")
        for key, bad in (("divergence_low", -0.1), ("divergence_high", -0.1), ("ratio_cap", 0.0))
    ],
    ("dro", {"beta": -0.1}, "beta"),
    ("opmd", {"tau": -0.1}, "tau"),
    ("opsm", {"delta": -1e-9}, "delta"),
    ("rec", {"clip_mode": "both"}, "clip_mode"),
    ("rec", {"weight": "gspo"}, "weight"),
    ("rec", {"regularizer": "k3"}, "regularizer"),
    ("rec", {"regularizer_coef": -0.1}, "regularizer_coef"),
    ("rec", {"temperature": 0.0}, "temperature"),
    ("rec", {"ring_low_threshold": -0.1}, "ring_low_threshold"),
    ("rec", {"ring_high_threshold": -0.1}, "ring_high_threshold"),
    ("rec", {**RING, "ring_low_threshold": 0.81}, "ring_low_threshold"),
    ("rec", {**RING, "ring_high_threshold": 1.19}, "ring_high_threshold"),
    ("mix", {"phi": 1}, "phi"),
    ("sapo", {"detached": 1}, "detached"),
    ("cispo", {"unified_mask": 1}, "unified_mask"),
    *[(name, {"fraction": bad}, "fraction") for name in ("clip_cov", "kl_cov") for bad in (-0.1, 1.1)],
    ("clip_cov", {"cov_low": 6.0}, "cov_low"),
    ("clip_cov", {"seed": -1}, "seed"),
    ("clip_cov", {"seed": 0.5}, "seed"),
    ("kl_cov", {"coef": -1.0}, "coef"),
    ("topk_jsd", {"beta": 0.0}, "beta"),
    ("topk_jsd", {"beta": 1.0}, "beta"),
    ("dpo", {"form": "bco"}, "form"),
    *[(name, {"beta": 0.0}, "beta") for name in ("dpo", "kto", "cpo", "simpo")],
    *[(name, {"label_smoothing": bad}, "label_smoothing") for name in ("dpo", "cpo") for bad in (-0.1, 0.5)],
    *[
        ("dpo", {"form": form, "label_smoothing": 0.1}, "label_smoothing")
        for form in ("hinge", "ipo", "apo_zero", "apo_down")
    ],
    ("kto", {"desirable_weight": -1.0}, "desirable_weight"),
    ("kto", {"undesirable_weight": -1.0}, "undesirable_weight"),
    ("kto", {"kl": -0.1}, "kl"),
    ("orpo", {"beta": -0.1}, "beta"),
    ("orpo", {"alpha": -0.1}, "alpha"),
    ("cpo", {"alpha": -0.1}, "alpha"),
    ("simpo", {"gamma": -0.1}, "gamma"),
    ("value_clipped", {"clip": -0.1}, "clip"),
    ("value_huber", {"delta": 0.0}, "delta"),
]


@for_each(("name", "settings", "where"), BAD, ids=[f"{n}-{s}" for n, s, _ in BAD])
def test_bad_settings(name, settings, where):
    """A setting out of range, of the wrong type or crossing another is a ConfigError that begins with its name."""
    driver, inputs = example(name, np.random.default_rng(0), sizes=(2, 3))
    with pytest.raises(ConfigError, match=f"^{where}\\b"):
        call(name, driver, inputs, settings)


EDGES = [
    *[
        (n, {"clip_low_threshold": 1, "clip_high_threshold": 1.0})
        for n in DEFAULTS
        if "clip_low_threshold" in DEFAULTS[n]
    ],
    *[(n, {"clip_low_threshold": 0.0}) for n in DEFAULTS if "clip_low_threshold" in DEFAULTS[n] and n != "gmpo"],
    ("dro", {"beta": 0.0}),
    ("opmd", {"tau": 0.0}),
    ("opsm", {"delta": 0.0}),
    ("vespo", {"k_pos": 0.0, "k_neg": 0.0}),
    ("vespo", {"lambda_pos": 0.5, "lambda_neg": 0.5}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 0.5}),
    ("rec", {"temperature": 0.5, "weight": "advantage"}),
    ("decoupled_ppo", {"behaviour_cap": 0.5}),
    ("dppo_tv", {"ratio_cap": 0.5}),
    ("dppo_kl", {"ratio_cap": 0.5}),
    ("simpo", {"beta": 0.5}),
    ("value_huber", {"delta": 0.5}),
    *[(name, {"label_smoothing": 0.49}) for name in ("dpo", "cpo")],
    ("dppo_tv", {"divergence_low": 0.0, "divergence_high": 0.0}),
    ("dppo_kl", {"divergence_low": 0.0, "divergence_high": 0.0}),
    ("rec", {**RING, "ring_low_threshold": 0.0}),
    ("rec", {**RING, "ring_low_threshold": 0.8, "ring_high_threshold": 1.2}),
    ("rec", {"ring_low_threshold": 0.9, "ring_high_threshold": 1.1}),
    ("clip_cov", {"fraction": 0.0, "cov_low": 5.0}),
    ("clip_cov", {"cov_low": -2.0, "cov_high": -1.0, "fraction": 1.0}),
    ("kl_cov", {"fraction": 1.0, "coef": 0.0}),
    ("kto", {"desirable_weight": 0.0, "undesirable_weight": 0.0}),
    ("orpo", {"beta": 0.0, "alpha": 0.0}),
    ("cpo", {"alpha": 0.0}),
    ("simpo", {"gamma": 0.0}),
    ("value_clipped", {"clip": 0.0}),
    ("value_clipped", {"clip": 1}),
]


@for_each(("name", "settings"), EDGES, ids=[f"{n}-{s}" for n, s in EDGES])
def test_edges_of_the_settings(name, settings):
    """The ends of a closed range are allowed, and integers where a number is asked for; the result is finite."""
    driver, inputs = example(name, np.random.default_rng(0))
    value, gradients, _ = call(name, driver, inputs, settings)
    assert math.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradients)


@for_each("name", [n for n in NAMES if "sampling_logprobs" in prepare(n).inputs])
def test_probability_of_one(name):
    """Tokens that policy and sampler are sure of (logprob 0), or nearly, do no harm."""
    driver, inputs = example(name, np.random.default_rng(0), sizes=(4, 4))
    driver = [np.array([0.0, 0.0, -1e-9, -3.0])] * 2
    inputs["sampling_logprobs"] = [np.array([0.0, -2.0, 0.0, 0.0])] * 2
    value, gradients, _ = call(name, driver, inputs)
    assert math.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradients)


def test_odds_of_certainty_are_finite():
    """ORPO at probability one has a finite loss; its odds have no gradient there, its likelihood has."""
    value, gradients, _ = call("orpo", [np.zeros(2), np.array([-1.0])], {})
    assert math.isfinite(value)
    np.testing.assert_allclose(gradients[0], -0.5)
    odds = [
        call("orpo", [np.array([lp]), np.array([-1e-6])], {}, {"alpha": 0.0, "beta": 1.0})[0]
        for lp in (0.0, -9e-8, -1e-7, -1.1e-7)
    ]
    assert odds[0] == odds[1] == odds[2] < odds[3] - 1e-3  # they stop at a mean logprob of -1e-7
