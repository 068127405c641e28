"""Settings of the losses: defaults pinned, values out of range refused by name, the ends of every range taken."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest

from rlkit import ConfigError
from rlkit.losses import kl, prepare, registry, with_entropy, with_kl
from tests.each import for_each
from tests.losses.calls import NAMES, call, example

NO_NUMBERS = (float("nan"), float("inf"), True, "1")


def number(default, good=(), bad=()):
    """The default of a setting, values at the ends of its range, and values that are refused."""
    return default, good, (*bad, *NO_NUMBERS)


def clip(low, high, lowest=0.0):
    return {
        "clip_low_threshold": number(low, (lowest, 1), (-0.1, *([0.0] if lowest else []), 1.3)),
        "clip_high_threshold": number(high, (1,), (0.2, 0.28, -0.1)),
    }


def least0(default):
    return number(default, (0.0,), (-0.1,))


def above0(default):
    return number(default, (0.5,), (0.0,))


FLAG = (False, (True,), (1,))
DUAL = {"dual_clip": number(None, (1.01,), (1.0, 0.5))}
PPO, GSPO = clip(0.8, 1.2), clip(0.9997, 1.0004)
SMOOTHING = {"label_smoothing": number(0.0, (0.49,), (-0.1, 0.5))}
SHARE = {"fraction": number(2e-4, (0.0, 1.0), (-0.1, 1.1))}
DPPO = {name: least0(0.2) for name in ("divergence_low", "divergence_high")} | {"ratio_cap": above0(20.0)}
SETTINGS = {  # loss -> setting -> default, ends of its range, refused values
    **{name: {} for name in ("reinforce", "importance_sampling", "cross_entropy", "sft_is", "sft_phi")},
    **{name: {} for name in ("topk_forward_kl", "topk_reverse_kl")},
    "ppo": PPO | DUAL,
    "decoupled_ppo": PPO | {"behaviour_cap": above0(None)},
    "cispo": clip(0.0, 4.0) | {"unified_mask": FLAG},
    **dict.fromkeys(("gspo", "gspo_token", "luspo"), GSPO),
    "gmpo": clip(math.exp(-0.4), math.exp(0.4), lowest=1e-3),
    "sapo": {"tau_pos": above0(1.0), "tau_neg": above0(1.05), "detached": FLAG},
    "vespo": {"k_pos": least0(2.0), "lambda_pos": above0(3.0), "k_neg": least0(3.0), "lambda_neg": above0(2.0)},
    "dppo_tv": DPPO | {"squared_coef": least0(0.0)},
    "dppo_kl": DPPO | {name: least0(0.05) for name in ("divergence_low", "divergence_high")},
    "dro": {"beta": least0(0.05)},
    "topr": {"threshold": number(0.0, (-1.0,))},
    "sppo": clip(1 / 1.3, 1.3),
    "rec": {
        "clip_mode": ("none", ("one-side", "two-side", "ring"), ("both", 1)),
        "weight": ("none", ("importance_sampling", "advantage"), ("gspo",)),
        **PPO,
        "ring_low_threshold": number(0.4, (0.0, 0.9), (-0.1,)),
        "ring_high_threshold": number(3.0, (1.1,), (-0.1,)),
        "temperature": above0(1.0),
        "regularizer": ("none", ("k2", "forward-kl"), ("k3",)),
        "regularizer_coef": least0(0.0),
    },
    "opmd": {"tau": least0(1.0)},
    "opsm": {"delta": number(0.1, (0.0,), (-1e-9,))} | PPO | DUAL,
    "clip_cov": SHARE
    | {"cov_low": number(1.0, (5.0,), (6.0,)), "cov_high": number(5.0, (1.0,))}
    | PPO
    | {"seed": (0, (1,), (-1, 0.5))},
    "kl_cov": SHARE | {"coef": least0(1.0)},
    "mix": PPO | DUAL | {"phi": FLAG},
    "topk_jsd": {"beta": number(0.5, (1e-3,), (0.0, 1.0))},
    "dpo": {"form": ("sigmoid", ("hinge", "ipo", "robust"), ("bco",)), "beta": above0(0.1)} | SMOOTHING,
    "kto": {"beta": above0(0.1)}
    | {name: least0(1.0) for name in ("desirable_weight", "undesirable_weight")}
    | {"kl": least0(0.0)},
    "orpo": {"beta": least0(0.1), "alpha": least0(1.0)},
    "cpo": {"beta": above0(0.1), "alpha": least0(1.0)} | SMOOTHING,
    "simpo": {"beta": above0(2.0), "gamma": least0(0.5)},
    "value_clipped": {"clip": number(0.2, (0.0, 1), (-0.1,))},
    "value_huber": {"delta": above0(10.0)},
}
CLIPPED = [name for name in SETTINGS if "clip_low_threshold" in SETTINGS[name]]
RING = {"clip_mode": "ring"}
TOGETHER = [  # refused only together
    *[("ppo", {"clip_high_threshold": high, "clip_low_threshold": low}) for low, high in ((0.2, 0.2), (0.0, -0.1))],
    ("gmpo", {"clip_low_threshold": -0.3, "clip_high_threshold": -0.1}),
    ("rec", {"ring_low_threshold": 0.81, **RING}),
    ("rec", {"ring_high_threshold": 1.19, **RING}),
    *[("dpo", {"label_smoothing": 0.1, "form": form}) for form in ("hinge", "ipo", "apo_zero", "apo_down")],
]
FINE = [  # and taken together
    *[(name, {"clip_low_threshold": 1, "clip_high_threshold": 1.0}) for name in CLIPPED],
    ("rec", {**RING, "ring_low_threshold": 0.0}),
    ("rec", {**RING, "ring_low_threshold": 0.8, "ring_high_threshold": 1.2}),
    ("rec", {"temperature": 0.5, "weight": "advantage"}),
    ("clip_cov", {"cov_low": -2.0, "cov_high": -1.0, "fraction": 1.0}),
    ("dpo", {"label_smoothing": 0.49, "form": "robust"}),
    *[(name, dict.fromkeys(("divergence_low", "divergence_high"), 0.0)) for name in ("dppo_tv", "dppo_kl")],
    ("kto", {"desirable_weight": 0.0, "undesirable_weight": 0.0}),
]
BAD = [(n, {k: value}) for n, known in SETTINGS.items() for k, (_, _, bad) in known.items() for value in bad]
GOOD = [(n, {k: value}) for n, known in SETTINGS.items() for k, (_, good, _) in known.items() for value in good]
LEVELS = {
    **dict.fromkeys(("dpo", "orpo", "cpo", "simpo"), ("pair", False)),
    **dict.fromkeys(("clip_cov", "kl_cov"), ("batch", False)),
    **dict.fromkeys(("gspo", "gspo_token", "luspo", "gmpo", "vespo", "opsm", "kto"), ("datum", False)),
}


@for_each("name", NAMES)
def test_defaults(name):
    """The settings of a loss, their order and their defaults; its level; weights are 1 by default."""
    assert name in SETTINGS, f"write down the settings of {name} in SETTINGS, above"
    prepared = prepare(name)
    assert list(prepared.settings.items()) == [(key, default) for key, (default, _, _) in SETTINGS[name].items()]
    assert (prepared.level, prepared.elementwise) == LEVELS.get(name, ("datum", True))
    assert prepared.optional["weights"] == 1.0
    assert not prepared.entropy


def test_defaults_of_the_rest():
    """Estimators, compositions, and the share of the expert in a mixture."""
    assert set(SETTINGS) == set(NAMES)
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
    for part in ("Args:", ">>> ", *(["Raises:"] if SETTINGS[name] and name != "dro" else [])):
        assert part in text, f"{name} lacks {part}"
    assert "Source: " in text or name == "cross_entropy"
    for parameter in inspect.signature(registry[name]).parameters:
        assert parameter in text.partition("Args:")[2] or parameter == "weights"


@for_each(("name", "settings"), [*BAD, *TOGETHER])
def test_bad_settings(name, settings):
    """A setting out of range, of the wrong type or crossing another is a ConfigError that begins with its name."""
    driver, inputs = example(name, np.random.default_rng(0), sizes=(2, 3))
    with pytest.raises(ConfigError, match=rf"^{next(iter(settings))}\b"):
        call(name, driver, inputs, settings)


@for_each(("name", "settings"), [*GOOD, *FINE])
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
