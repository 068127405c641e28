"""A law of every setting: changing it alone changes the result, and no two settings change it in the same way.

That tells apart settings whose defaults are equal, and finds one that is passed on to nothing.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import rlkit.advantages as adv
from rlkit import corrections, filters, metrics, rewards, schedules
from tests.each import for_each
from tests.losses.calls import NAMES, call, example

DATA = ("trainer_logprobs", "sampling_logprobs", "reference_logprobs", "teacher_logprobs", "entropy", "logprobs")
DATA += ("advantages", "sum_p2", "sum_p2_logp", "lengths", "values", "log_ratios", "potentials", "weights", "rng")

# Losses: the settings that stand while one is changed, and what it is changed to.
WIDE = {"clip_low_threshold": 0.6, "clip_high_threshold": 1.7}
LOSS_CONTEXT: dict[str, dict[str, Any]] = {
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "decoupled_ppo": {"behaviour_cap": 1.5},
    "clip_cov": {"fraction": 0.1, "cov_low": 0.0, "cov_high": 9.0},
    "kl_cov": {"fraction": 0.5},
    "rec": {
        "clip_mode": "ring",
        "weight": "advantage",
        "regularizer": "k2",
        "regularizer_coef": 0.2,
        "ring_low_threshold": 0.5,
        "ring_high_threshold": 1.6,
    },
    "dppo_tv": {"divergence_low": 0.05, "divergence_high": 0.06},
    "dppo_kl": {"divergence_low": 0.01, "divergence_high": 0.02},
    "opsm": {"delta": 0.05},
    "dpo": {"label_smoothing": 0.0},
    "kto": {"beta": 0.5},
    "value_clipped": {"clip": 0.6},
    "value_huber": {"delta": 0.7},
}
LOSS_OTHER: dict[str, Any] = {
    "clip_low_threshold": 0.9,
    "clip_high_threshold": 1.1,
    "dual_clip": 1.2,
    "behaviour_cap": 0.9,
    "unified_mask": True,
    "tau_pos": 2.0,
    "detached": True,
    "threshold": 0.4,
    "tau_neg": 0.4,
    "k_pos": 1.0,
    "lambda_pos": 1.5,
    "k_neg": 1.2,
    "lambda_neg": 0.9,
    "divergence_low": 0.01,
    "divergence_high": 0.02,
    "ratio_cap": 1.05,
    "squared_coef": 0.3,
    "tau": 0.4,
    "clip_mode": "one-side",
    "weight": "importance_sampling",
    "ring_low_threshold": 0.7,
    "ring_high_threshold": 1.25,
    "temperature": 2.0,
    "regularizer": "forward-kl",
    "regularizer_coef": 0.7,
    "fraction": 0.2,
    "cov_low": 0.4,
    "cov_high": 0.6,
    "seed": 5,
    "coef": 0.3,
    "phi": True,
    "form": "hinge",
    "beta": 0.8,
    "label_smoothing": 0.2,
    "desirable_weight": 0.4,
    "undesirable_weight": 1.7,
    "kl": 0.6,
    "alpha": 0.3,
    "gamma": 1.4,
    "delta": 0.2,
    "clip": 0.05,
}
LOSS_OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gspo", "gspo_token", "luspo"), WIDE),
    "sppo": {"clip_low_threshold": 0.6, "clip_high_threshold": 1.7},
    "dppo_kl": {"divergence_low": 0.1, "divergence_high": 0.001},
    "opsm": {"delta": 0.5},
}

# Functions of numpy: the call, and what each setting is changed to. NaN for settings that are data.
G = [[1.0, 0.2, 0.0, 0.7], [0.4, 0.4, 0.9, 0.1]]
ONE = [[1.0, 0.0], [0.6]]  # with a group of one
T = [[0.3, -0.2, 1.0], [0.5, 0.1]]
V = [[0.2, 0.4, 0.1], [-0.3, 0.6]]
P, Q = [[-0.5, -1.5, -2.0], [-0.7, -1.1]], [[-0.9, -1.0, -2.2], [-1.6, -1.0]]
RATIOS = {"trainer_logprobs": P, "sampling_logprobs": Q}
MASK = [[1, 0, 1], [1, 1]]
SEQUENCES = {"trainer_logprobs": P, "sampling_logprobs": [[-0.9, -1.0, -1.2], [-1.6, -1.0]]}  # ratios 0.41 and 2.2
BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.3}
TIME = {"gamma": 0.7, "bootstrap_value": 0.5, "mask": MASK}
WHITE = {"ddof": 0, "eps": 0.5}
SCORES = {"entropy": [1.2, 0.3, 2.0, 0.9], "logprobs": [-0.3, -1.2, -2.0, -0.1], "advantages": [-1.0] * 4}
SUMS = {"sum_p2": [0.4, 0.8, 0.2, 0.6], "sum_p2_logp": [-0.3, -0.2, -0.35, -0.25]}
MATTER: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "adv.grpo": (adv.grpo, {"rewards": [*G, [0.6]]}, {"scale": "batch", **WHITE, "singleton": "raw"}),
    "adv.dr_grpo": (adv.dr_grpo, {"rewards": ONE}, {"singleton": "raw"}),
    "adv.rloo": (adv.rloo, {"rewards": ONE}, {"singleton": "raw"}),
    "adv.loo_std": (adv.loo_std, {"rewards": [*G, [0.6]]}, {"eps": 0.5, "singleton": "raw"}),
    "adv.maxrl": (adv.maxrl, {"rewards": ONE}, {"singleton": "raw"}),
    "adv.opo": (adv.opo, {"rewards": ONE, "lengths": [[1, 2], [3]]}, {"singleton": "raw"}),
    "adv.asymre": (adv.asymre, {"rewards": ONE}, {"shift": 0.3, "singleton": "raw"}),
    "adv.opmd": (
        adv.opmd,
        {"rewards": ONE, "baseline": "logavgexp"},
        {"tau": 0.4, "singleton": "raw", "baseline": "mean"},
    ),
    "adv.gpg": (
        adv.gpg,
        {"rewards": [*G, [0.6], [1.0, 1.0]]},
        {"count": "groups", "f_norm": 2.5, "singleton": "raw"},
    ),
    "adv.reinforce": (adv.reinforce, {"rewards": G, "normalize": True}, {"normalize": False, **WHITE}),
    "adv.rec": (
        adv.rec,
        {"rewards": [*G, [0.6]], "normalize": True},
        {"normalize": False, "ddof": 1, "eps": 0.5, "singleton": "raw"},
    ),
    "adv.gdpo": (
        adv.gdpo,
        {"rewards": [[1.0, 0.2, 0.0, 0.7], [0.4, 0.4, 0.9, 0.1]]},
        {"weights": [1.0, 3.0], **WHITE},
    ),
    "adv.pass_at_k": (adv.pass_at_k, {"rewards": [*G, [0.6]]}, {"scale": "none", **WHITE, "singleton": "raw"}),
    "adv.pkpo": (adv.pkpo, {"rewards": G, "k": 2}, {"baseline": "none", "k": 3}),
    "adv.step_wise_grpo": (
        adv.step_wise_grpo,
        {"rewards": [*G, [0.6]], "steps": [[1, 2, 1, 3], [2, 2, 1, 1], [2]]},
        {"step_norm": True, "scale": "none", **WHITE, "singleton": "raw"},
    ),
    "adv.gigpo": (
        adv.gigpo,
        {"rewards": [[0.1, 1.0], [0.3, 0.2], [0.9]], "states": [["a", "b"], ["a", "b"], ["a"]]},
        {"omega": 0.3, "gamma": 0.5, "scale": "none", **WHITE},
    ),
    "adv.hierarchical_grpo": (
        adv.hierarchical_grpo,
        {"rewards": [1.0, 0.0, 0.7], "roles": ["a", "a", "b"], "groups": ["g", "g", "g"]},
        {"singleton": "raw"},
    ),
    "adv.reinforce_pp_baseline": (
        adv.reinforce_pp_baseline,
        {"rewards": [*G, [0.6]], "lengths": [[1, 2, 3, 1], [2, 2, 1, 1], [4]]},
        {**WHITE, "singleton": "raw"},
    ),
    "adv.reinforce_pp": (
        adv.reinforce_pp,
        {"rewards": T, "kl": V, "kl_coef": 0.1},
        {"kl": [[0.1, 0.4, 0.1], [-0.3, 0.6]], "kl_coef": 0.6, "gamma": 0.5, "mask": MASK, **WHITE},
    ),
    "adv.remax": (adv.remax, {"rewards": T, "baseline": 0.2}, {"gamma": 0.5, "mask": MASK, "baseline": 0.7}),
    "adv.discounted_returns": (adv.discounted_returns, {"rewards": T, "gamma": 0.9}, TIME),
    "adv.rebn": (adv.rebn, {"returns": T}, {**WHITE, "mask": MASK}),
    "adv.gae": (adv.gae, {"rewards": T, "values": V, "gamma": 0.9}, {**TIME, "lam": 0.3, "values": T}),
    "adv.lambda_returns": (adv.lambda_returns, {"rewards": T, "values": V, "gamma": 0.9}, {**TIME, "lam": 0.3}),
    "adv.n_step_returns": (adv.n_step_returns, {"rewards": T, "values": V, "gamma": 0.9}, {**TIME, "n": 2}),
    "adv.vtrace": (
        adv.vtrace,
        {"rewards": T, "values": V, "log_ratios": [[0.9, 0.8, -0.2], [0.7, -0.4]], "gamma": 0.9, "lam": 0.9},
        {**TIME, "lam": 0.3, "clip_rho": 1.7, "clip_pg_rho": 1.9},
    ),
    "adv.potential_shaping": (
        adv.potential_shaping,
        {"rewards": T, "potentials": V},
        {"gamma": 0.5, "mask": MASK},
    ),
    "adv.length_adaptive_lambda": (adv.length_adaptive_lambda, {"lengths": [30, 50]}, {"alpha": 0.2}),
    "adv.on_policy_distillation": (
        adv.on_policy_distillation,
        {"teacher_logprobs": P, "sampling_logprobs": Q, "gamma": 0.2},
        {"coef": 0.5, "clip": 0.1, "gamma": 0.8, "mask": MASK},
    ),
    "adv.jsd": (adv.jsd, {"teacher_logprobs": P, "sampling_logprobs": Q}, {"beta": 0.2, "coef": 0.3, "mask": MASK}),
    "adv.jsd_gradient": (
        adv.jsd_gradient,
        {"teacher_logprobs": P, "sampling_logprobs": Q},
        {"beta": 0.2, "coef": 0.3, "mask": MASK},
    ),
    "adv.kl_penalty": (
        adv.kl_penalty,
        {"sampling_logprobs": Q, "reference_logprobs": P},
        {"coef": 0.3, "estimator": "k2", "center": True, "mask": MASK},
    ),
    "adv.entropy_bonus": (adv.entropy_bonus, {"sampling_logprobs": Q}, {"coef": 0.3, "mask": MASK}),
    "adv.token_weights": (
        adv.token_weights,
        {"lengths": [1, 2, 4], "mode": "seq-mean-token-sum-norm", "constant": 4.0},
        {"constant": 9.0},
    ),
    "adv.running_baseline": (
        lambda **s: [adv.running_baseline(**s).update([1.0, 3.0]), _second(adv.running_baseline(**s))],
        {},
        {"decay": 0.2},
    ),
    "adv.running_normalization": (lambda **s: adv.running_normalization(**s).update([1.0, 3.0, 7.0]), {}, WHITE),
    "corrections.token_tis": (corrections.token_tis, RATIOS, BOUNDS),
    "corrections.sequence_tis": (
        corrections.sequence_tis,
        SEQUENCES,
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5},
    ),
    "corrections.icepop": (corrections.icepop, RATIOS, BOUNDS),
    "corrections.clamp": (corrections.clamp, RATIOS, {"bound": 0.2}),
    "corrections.token_mask": (corrections.token_mask, RATIOS, BOUNDS),
    "corrections.sequence_mask": (
        corrections.sequence_mask,
        SEQUENCES,
        {"clip_low_threshold": 0.3, "clip_high_threshold": 2.4},
    ),
    "corrections.geometric_sequence_mask": (
        corrections.geometric_sequence_mask,
        {**SEQUENCES, "clip_low_threshold": 0.7, "clip_high_threshold": 1.6},
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2},
    ),
    "corrections.outlier_veto": (
        corrections.outlier_veto,
        {"trainer_logprobs": P, "sampling_logprobs": [[-0.9, -1.0, -2.2], [-1.6, -1.1]]},
        {"clip_low_threshold": 0.9, "clip_high_threshold": 2.0},
    ),
    "corrections.divergence_rejection": (
        corrections.divergence_rejection,
        {**RATIOS, "threshold": 0.09, "estimator": "k2"},
        {"level": "sequence-sum", "estimator": "k3", "threshold": 0.5},
    ),
    "corrections.top_entropy": (corrections.top_entropy, {"entropy": [0.1, 0.5, 0.9]}, {"fraction": 0.7}),
    "corrections.clip_b": (corrections.clip_b, SCORES, {"mu": 0.1}),
    "corrections.clip_v": (
        corrections.clip_v,
        {**SCORES, **SUMS, "mu": 0.1, "max_fraction": 0.3},
        {"mu": 3.0, "max_fraction": 1.0},
    ),
    "metrics.chi2": (metrics.chi2, RATIOS, {"level": "sequence"}),
    "metrics.clip_fraction": (metrics.clip_fraction, RATIOS, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.6}),
    "metrics.token_lag": (
        metrics.token_lag,
        {"versions": [[1, 2], [3]], "current": 4},
        {"current": 6, "versions": [[2, 2], [3]]},
    ),
    "metrics.group_informativeness": (
        metrics.group_informativeness,
        {"rewards": [[0.0, 0.0], [0.3, 0.3], [1.0, 1.0], [1.0, 0.0]]},
        {"low": 0.3, "high": 0.3},
    ),
    "filters.difficulty_band": (
        filters.difficulty_band,
        {"rewards": [[0.2, 0.2], [0.9, 0.9]]},
        {"low": 0.3, "high": 0.8},
    ),
    "filters.dynamic_sampling": (
        filters.dynamic_sampling,
        {"rewards": [[1.0, 0.0], [1.0, 1.0], [0.5, 0.0], [0.0, 1.0]], "correct": 1.0, "needed": 3},
        {"correct": 0.5, "needed": 1, "keep_when_insufficient": True},
    ),
    "filters.overlong": (filters.overlong, {"lengths": [3, 8], "max_length": 9}, {"max_length": 5}),
    "filters.stale": (
        filters.stale,
        {"versions": [1, 3, 5], "current": 5, "max_lag": 2},
        {"current": 6, "max_lag": 4},
    ),
    "filters.zero_variance": (filters.zero_variance, {"rewards": [[0.4, 0.5], [1.0, 0.0]]}, {"threshold": 0.2}),
    "rewards.affine": (rewards.affine, {"rewards": [0.5, 1.5]}, {"scale": 2.0, "bias": 0.25}),
    "rewards.clamp": (
        rewards.clamp,
        {"rewards": [-2.0, 0.5, 2.0], "low": -3.0, "high": 3.0},
        {"low": 0.0, "high": 1.0},
    ),
    "rewards.cosine_length": (
        rewards.cosine_length,
        {"correct": [True, False, True], "lengths": [3, 4, 9], "max_length": 8},
        {"max_length": 6, "right": (2.0, 1.0), "wrong": (-3.0, 0.0), "exceeded": -9.0},
    ),
    "rewards.length_cost": (
        rewards.length_cost,
        {"lengths": [3, 4], "max_length": 8},
        {"max_length": 5, "coef": 0.3},
    ),
    "rewards.mapping": (rewards.mapping, {"rewards": [1.0, 2.0], "table": {1: 5.0}, "default": 0.0}, {"default": -1.0}),
    "rewards.nonterminal_override": (
        rewards.nonterminal_override,
        {"rewards": [0.6, 0.3], "finished": [False, True]},
        {"value": -1.0},
    ),
    "rewards.nonterminal_reward": (
        rewards.nonterminal_reward,
        {"rewards": [[0.6], [0.3]], "finished": [False, True]},
        {"value": -1.0},
    ),
    "rewards.overlong_penalty": (
        rewards.overlong_penalty,
        {"lengths": [3, 6, 7], "max_length": 8, "buffer": 4},
        {"max_length": 9, "buffer": 3, "factor": 0.4},
    ),
    "rewards.repetition_penalty": (
        rewards.repetition_penalty,
        {"tokens": [[1, 2, 1, 2, 1, 2]]},
        {"ngram": 1, "factor": 0.3},
    ),
    "rewards.stop_properly": (
        rewards.stop_properly,
        {"rewards": [1.0, 0.5], "truncated": [True, False]},
        {"coef": 0.4},
    ),
    "rewards.think_format": (
        rewards.think_format,
        {"texts": ["<think>a</think>", "a</think>", "[a]"]},
        {"tags": ("[", "]"), "opened": True},
    ),
    "rewards.whitening": (rewards.whitening, {"rewards": [0.1, 0.9, 0.3]}, WHITE),
    "schedules.chord_schedule": (
        schedules.chord_schedule,
        {"step": 7, "warmup_steps": 4, "decay_steps": 9},
        {"warmup_steps": 8, "decay_steps": 12, "peak": 0.5, "valley": 0.2},
    ),
    "schedules.constant": (schedules.constant, {"step": 1, "value": 0.1}, {"value": 0.2}),
    "schedules.cosine": (
        schedules.cosine,
        {"step": 3, "start": 1.0, "end": 0.1, "steps": 9},
        {"start": 0.5, "end": 0.2, "steps": 7},
    ),
    "schedules.linear": (
        schedules.linear,
        {"step": 3, "start": 1.0, "end": 0.1, "steps": 9},
        {"start": 0.5, "end": 0.2, "steps": 7},
    ),
    "schedules.lr_for": (
        schedules.lr_for,
        {"model": "Qwen/Qwen3-8B", "hidden_size": 4096},
        {"hidden_size": 2048, "lora": False},
    ),
    "schedules.warmup": (schedules.warmup, {"step": 2, "steps": 9}, {"steps": 5}),
    "schedules.wsd": (
        lambda **s: [schedules.wsd(step, **s) for step in (1, 5, 9)],
        {"peak": 1.0, "steps": 10, "warmup_steps": 3, "decay_steps": 4, "end": 0.1},
        {"peak": 0.5, "steps": 12, "warmup_steps": 2, "decay_steps": 5, "end": 0.3},
    ),
}
EXEMPT = {  # settings that are told apart elsewhere, or are not of this kind
    "adv.gdpo": {"singleton"},  # all components of a group of one are 0 or its own reward: test_components
    "adv.pass_at_k": {"method", "k"},  # go together: method="analytic" needs k
    "adv.pkpo": {"singleton"},  # k is at most the size of the smallest group
    "adv.rec": {"drop", "rng"},  # drops at random
    "adv.token_weights": {"groups"},  # with mode="prompt-mean" alone, where constant is refused
}


def _second(baseline: Any) -> np.ndarray:
    baseline.update([2.0])
    return np.asarray(baseline.update([5.0]))


def _flat(result: Any) -> np.ndarray:
    """Everything that a result holds, as one array."""
    if isinstance(result, filters.Selection):
        return np.append(result.keep.astype(float), sorted(result.dropped.values()))
    if isinstance(result, Mapping):
        return np.concatenate([_flat(value) for value in result.values()])
    if isinstance(result, (list, tuple)):
        return np.concatenate([_flat(value) for value in result])
    return np.nan_to_num(np.ravel(np.asarray(result, float)), nan=-1e9)


def _check(base: np.ndarray, changed: Mapping[str, np.ndarray]) -> None:
    """All results differ from the first and from each other."""
    for (a, x), (b, y) in itertools.combinations([("nothing", base), *changed.items()], 2):
        same = x.shape == y.shape and np.allclose(x, y, rtol=1e-9, atol=1e-12)
        assert not same, f"changing {b} gives what changing {a} gives"


@for_each("name", NAMES)
def test_settings_of_losses(name: str) -> None:
    """Value and gradient of a loss on made-up data, some way off-policy."""
    signature = inspect.signature(__import__("rlkit.losses", fromlist=["registry"]).registry[name])
    keys = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    driver, inputs = example(name, np.random.default_rng(3), (30, 16, 24, 20, 3, 9), spread=0.6)

    def result(**settings: Any) -> np.ndarray:
        value, gradients, _ = call(name, driver, inputs, {**LOSS_CONTEXT.get(name, {}), **settings})
        return np.append(np.concatenate([np.ravel(g) for g in gradients]), value)

    _check(result(), {key: result(**{key: LOSS_OTHERS.get(name, {}).get(key, LOSS_OTHER[key])}) for key in keys})


@for_each("name", sorted(MATTER))
def test_settings_of_functions(name: str) -> None:
    """Estimators, corrections, metrics, filters, rewards and schedules."""
    function, given, others = MATTER[name]
    _check(_flat(function(**given)), {key: _flat(function(**{**given, key: value})) for key, value in others.items()})


def test_every_setting_is_in_the_table() -> None:
    """A setting that is added has to matter, too."""
    modules = {"corrections": corrections, "metrics": metrics, "filters": filters, "rewards": rewards}
    functions = {f"adv.{name}": function for name, function in adv.registry.items()}
    for title, module in {**modules, "schedules": schedules}.items():
        functions |= {
            f"{title}.{n}": getattr(module, n) for n in module.__all__ if inspect.isfunction(getattr(module, n))
        }
    for name, function in functions.items():
        keys = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
        keys -= set(DATA) - {"weights"} if name == "adv.gdpo" else set(DATA)
        there = set(MATTER[name][2]) if name in MATTER else set()
        assert keys - there - EXEMPT.get(name, set()) == set(), name
