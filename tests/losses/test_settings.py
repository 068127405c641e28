"""Settings of the losses: defaults are pinned, values out of range are errors that begin with their names."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest

from rlkit import ConfigError
from rlkit.losses import prepare, registry, with_entropy, with_kl
from tests.each import for_each
from tests.losses.calls import BATCHES, NAMES, PAIRS, call, example

KINDS = {  # of numbers: values at the ends of the range, and values that are refused
    ">= 0": ((0.0,), (-0.1, -1e-9)), "> 0": ((0.5,), (0.0,)), "> 1": ((1.01,), (1.0, 0.5)), "any": ((-1.0,), ()),
    "[0, 1]": ((0.0, 1.0), (-0.1, 1.1)), "(0, 1)": ((1e-3,), (0.0, 1.0)), "[0, 0.5)": ((0.49,), (-0.1, 0.5)),
    "low": ((0.0, 1), (-0.1, 1.3)), "low > 0": ((1e-3, 1), (-0.1, 0.0, 1.3)), "high": ((1,), (0.2, 0.28, -0.1)),
    "ring low": ((0.0, 0.9), (-0.1,)), "ring high": ((1.1,), (-0.1,)), "<= 5": ((5.0,), (6.0,)), ">= 1": ((1.0,), ()),
}  # fmt: skip
KINDS = {kind: (good, (*bad, float("nan"), float("inf"), True, "1")) for kind, (good, bad) in KINDS.items()}
KINDS |= {"flag": ((True,), (1,)), "seed": ((1,), (-1, 0.5)), "form": (("hinge", "ipo", "robust"), ("bco",))}
KINDS |= {"mode": (("one-side", "two-side", "ring"), ("both", 1)), "pull": (("k2", "forward-kl"), ("k3",))}
KINDS |= {"weight": (("importance_sampling", "advantage"), ("gspo",))}


def clip(low, high, kind="low"):
    return {"clip_low_threshold": (low, kind), "clip_high_threshold": (high, "high")}


def divergence(bound):
    return {"divergence_low": (bound, ">= 0"), "divergence_high": (bound, ">= 0"), "ratio_cap": (20.0, "> 0")}


PPO, GSPO, DUAL = clip(0.8, 1.2), clip(0.9997, 1.0004), {"dual_clip": (None, "> 1")}
BETA, ALPHA, SMOOTHING = {"beta": (0.1, "> 0")}, {"alpha": (1.0, ">= 0")}, {"label_smoothing": (0.0, "[0, 0.5)")}
SHARE = {"fraction": (2e-4, "[0, 1]")}
SETTINGS = {  # loss -> setting -> default and kind
    "reinforce": {}, "importance_sampling": {}, "cross_entropy": {}, "sft_is": {}, "sft_phi": {},
    "topk_forward_kl": {}, "topk_reverse_kl": {}, "topk_jsd": {"beta": (0.5, "(0, 1)")},
    "ppo": PPO | DUAL, "mix": PPO | DUAL | {"phi": (False, "flag")}, "opsm": {"delta": (0.1, ">= 0")} | PPO | DUAL,
    "decoupled_ppo": PPO | {"behaviour_cap": (None, "> 0")}, "topr": {"threshold": (0.0, "any")},
    "cispo": clip(0.0, 4.0) | {"unified_mask": (False, "flag")}, "dro": {"beta": (0.05, ">= 0")},
    "gspo": GSPO, "gspo_token": GSPO, "luspo": GSPO, "gmpo": clip(math.exp(-0.4), math.exp(0.4), "low > 0"),
    "sapo": {"tau_pos": (1.0, "> 0"), "tau_neg": (1.05, "> 0"), "detached": (False, "flag")},
    "vespo": {"k_pos": (2.0, ">= 0"), "lambda_pos": (3.0, "> 0"), "k_neg": (3.0, ">= 0"), "lambda_neg": (2.0, "> 0")},
    "dppo_tv": divergence(0.2) | {"squared_coef": (0.0, ">= 0")}, "dppo_kl": divergence(0.05),
    "rec": {"clip_mode": ("none", "mode"), "weight": ("none", "weight")} | PPO
    | {"ring_low_threshold": (0.4, "ring low"), "ring_high_threshold": (3.0, "ring high"), "temperature": (1.0, "> 0")}
    | {"regularizer": ("none", "pull"), "regularizer_coef": (0.0, ">= 0")},
    "clip_cov": SHARE | {"cov_low": (1.0, "<= 5"), "cov_high": (5.0, ">= 1")} | PPO | {"seed": (0, "seed")},
    "sppo": clip(1 / 1.3, 1.3), "kl_cov": SHARE | {"coef": (1.0, ">= 0")}, "opmd": {"tau": (1.0, ">= 0")},
    "dpo": {"form": ("sigmoid", "form")} | BETA | SMOOTHING, "cpo": BETA | ALPHA | SMOOTHING,
    "kto": BETA | {"desirable_weight": (1.0, ">= 0"), "undesirable_weight": (1.0, ">= 0"), "kl": (0.0, ">= 0")},
    "orpo": {"beta": (0.1, ">= 0")} | ALPHA, "simpo": {"beta": (2.0, "> 0"), "gamma": (0.5, ">= 0")},
    "value_clipped": {"clip": (0.2, ">= 0")}, "value_huber": {"delta": (10.0, "> 0")},
}  # fmt: skip
RING, ROBUST = {"clip_mode": "ring"}, {"form": "robust"}
TOGETHER = [  # refused only together
    *[("ppo", {"clip_high_threshold": high, "clip_low_threshold": low}) for low, high in ((0.2, 0.2), (0.0, -0.1))],
    ("gmpo", {"clip_low_threshold": -0.3, "clip_high_threshold": -0.1}),
    ("rec", {"ring_low_threshold": 0.81, **RING}), ("rec", {"ring_high_threshold": 1.19, **RING}),
    *[("dpo", {"label_smoothing": 0.1, "form": form}) for form in ("hinge", "ipo", "apo_zero", "apo_down")],
]  # fmt: skip
FINE = [  # and allowed together
    *[(name, dict.fromkeys(GSPO, 1)) for name, settings in SETTINGS.items() if settings.keys() >= GSPO.keys()],
    ("rec", {**RING, "ring_low_threshold": 0.0}), ("rec", {"temperature": 0.5, "weight": "advantage"}),
    ("rec", {**RING, "ring_low_threshold": 0.8, "ring_high_threshold": 1.2}),
    ("clip_cov", {"cov_low": -2.0, "cov_high": -1.0, "fraction": 1.0}), ("dpo", {"label_smoothing": 0.49, **ROBUST}),
    *[(name, {"divergence_low": 0.0, "divergence_high": 0.0}) for name in ("dppo_tv", "dppo_kl")],
    ("kto", {"desirable_weight": 0.0, "undesirable_weight": 0.0}),
]  # fmt: skip
GOOD, BAD = (
    [(name, {key: x}) for name, known in SETTINGS.items() for key, (_, kind) in known.items() for x in KINDS[kind][i]]
    for i in (0, 1)
)
LEVELS = {**dict.fromkeys(PAIRS, ("pair", False)), **dict.fromkeys(BATCHES, ("batch", False))}
LEVELS |= dict.fromkeys(("gspo", "gspo_token", "luspo", "gmpo", "vespo", "opsm", "kto"), ("datum", False))


@for_each("name", NAMES)
def test_defaults(name):
    """The settings of a loss, their order and their defaults, its level, and what its docstring has."""
    assert name in SETTINGS, f"write down the settings of {name} in SETTINGS, above"
    prepared = prepare(name)
    assert list(prepared.settings.items()) == [(key, default) for key, (default, _) in SETTINGS[name].items()]
    assert (prepared.level, prepared.elementwise) == LEVELS.get(name, ("datum", True))
    assert prepared.optional["weights"] == 1.0
    text = inspect.getdoc(registry[name])
    assert ">>> " in text
    assert "Raises:" in text or not SETTINGS[name] or name == "dro"
    assert all(x in text.partition("Args:")[2] for x in {*inspect.signature(registry[name]).parameters} - {"weights"})


def test_defaults_of_the_rest():
    """Estimators, compositions, and the share of the expert in a mixture."""
    assert set(SETTINGS) == set(NAMES)
    assert prepare("mix").optional["mu"] == 0.1
    clamped = prepare(with_kl("reinforce", estimator="clamped")).settings
    assert clamped == {"kl_coef": 0.01, "log_ratio_bound": 20.0, "value_bound": 10.0}
    assert with_kl.__defaults__ == (0.01, "k3")
    assert prepare(with_entropy("reinforce")).settings == {"entropy_coef": 0.01}


@for_each(("name", "settings"), [*BAD, *TOGETHER])
def test_bad_settings(name, settings):
    """A setting out of range, of the wrong type or crossing another is a ConfigError that begins with its name."""
    driver, inputs = example(name, np.random.default_rng(0), sizes=(2, 3))
    with pytest.raises(ConfigError, match=rf"^{next(iter(settings))}\b"):
        call(name, driver, inputs, settings)


@for_each(("name", "settings"), [*GOOD, *FINE])
def test_edges_of_the_settings(name, settings):
    """The ends of a closed range are allowed, and integers where a number is asked for; the result is finite."""
    value, gradients, _ = call(name, *example(name, np.random.default_rng(0)), settings)
    assert np.isfinite([value, *np.concatenate([np.ravel(g) for g in gradients])]).all()


@for_each("name", [n for n in NAMES if "sampling_logprobs" in prepare(n).inputs])
def test_probability_of_one(name):
    """Tokens that policy and sampler are sure of (logprob 0), or nearly, do no harm."""
    _, inputs = example(name, np.random.default_rng(0), sizes=(4, 4))
    inputs["sampling_logprobs"] = [np.array([0.0, -2.0, 0.0, 0.0])] * 2
    value, gradients, _ = call(name, [np.array([0.0, 0.0, -1e-9, -3.0])] * 2, inputs)
    assert np.isfinite([value, *np.concatenate(gradients)]).all()


def test_odds_of_certainty_are_finite():
    """ORPO at probability one has a finite loss; its odds have no gradient there, its likelihood has."""
    value, gradients, _ = call("orpo", [np.zeros(2), np.array([-1.0])], {})
    assert math.isfinite(value)
    np.testing.assert_allclose(gradients[0], -0.5)
    only = {"alpha": 0.0, "beta": 1.0}
    odds = [call("orpo", [np.array([lp]), np.array([-1e-6])], {}, only)[0] for lp in (0.0, -9e-8, -1e-7, -1.1e-7)]
    assert odds[0] == odds[1] == odds[2] < odds[3] - 1e-3  # they stop at a mean logprob of -1e-7
