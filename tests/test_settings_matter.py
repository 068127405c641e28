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
from rlkit import corrections, filters, losses, metrics, rewards, schedules
from tests.each import for_each
from tests.losses.calls import call, example

R = [[0.3, -0.2, 1.0], [0.5, 0.1], [0.6], [1.0, 1.0]]  # with a group of one, and one that is all right
G = [[1.0, 0.2, 0.0, 0.7], [0.4, 0.4, 0.9, 0.1]]
V = [[0.2, 0.4, 0.1], [-0.3, 0.6], [0.4], [0.7, -0.2]]
SAME = [[-0.4], [-1.0, -0.3]]
P, Q = [[-0.5, -1.5, -2.0], [-0.7, -1.1], *SAME], [[-0.9, -1.0, -2.2], [-1.6, -1.0], *SAME]
MASK = [[1, 0, 1], [1, 1], [1], [0, 1]]
SEQUENCES = {"sampling_logprobs": [[-0.9, -1.0, -1.2], [-1.6, -1.0], *SAME]}  # ratios 0.41, 2.2 and 1
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
GIVEN: dict[str, Any] = {  # arguments without a default
    "rewards": R, "returns": R, "values": V, "potentials": V, "trainer_logprobs": P, "sampling_logprobs": Q,
    "reference_logprobs": P, "teacher_logprobs": P, "steps": [[1, 2, 1], [2, 3], [2], [1, 1]], "baseline": 0.2,
    "lengths": [[3, 1, 2], [2, 4], [1], [3, 3]], "log_ratios": [[0.9, 0.8, -0.2], [0.7, -0.4], [0.6], [-0.1, 0.3]],
    "logprobs": [-0.3, -1.2, -2.0, -0.1], "advantages": [-1.0] * 4, "entropy": [1.2, 0.3, 2.0, 0.9],
    "sum_p2": [0.4, 0.8, 0.2, 0.6], "sum_p2_logp": [-0.3, -0.2, -0.35, -0.25], "max_length": 8, "start": 1.0,
    "end": 0.1, "finished": [False, True], "model": "Qwen/Qwen3-8B",
}  # fmt: skip
OTHER: dict[str, Any] = {  # what a setting is changed to
    LOW: 0.9, HIGH: 1.1, "dual_clip": 1.2, "behaviour_cap": 0.9, "unified_mask": True, "tau_pos": 2.0, "tau_neg": 0.4,
    "detached": True, "k_pos": 1.0, "lambda_pos": 1.5, "k_neg": 1.2, "lambda_neg": 0.9, "divergence_low": 0.01,
    "divergence_high": 0.02, "ratio_cap": 1.05, "squared_coef": 0.3, "tau": 0.4, "clip_mode": "one-side",
    "weight": "importance_sampling", "ring_low_threshold": 0.7, "ring_high_threshold": 1.25, "temperature": 2.0,
    "regularizer": "forward-kl", "regularizer_coef": 0.7, "fraction": 0.2, "cov_low": 0.4, "cov_high": 0.6, "seed": 5,
    "coef": 0.3, "phi": True, "form": "hinge", "beta": 0.8, "label_smoothing": 0.2, "desirable_weight": 0.4,
    "undesirable_weight": 1.7, "kl": 0.6, "alpha": 0.3, "delta": 0.2, "clip": 0.05, "singleton": "raw", "ddof": 0,
    "eps": 0.5, "scale": "none", "shift": 0.3, "count": "groups", "f_norm": 2.5, "normalize": False, "gamma": 0.5,
    "bootstrap_value": 0.5, "mask": MASK, "lam": 0.3, "omega": 0.3, "step_norm": True, "kl_coef": 0.6, "clip_rho": 1.7,
    "clip_pg_rho": 1.9, "estimator": "k2", "center": True, "decay": 0.2, "bound": 0.2, "threshold": 0.4, "n": 2,
    "level": "sequence", "low": 0.3, "high": 0.8, "max_length": 6, "mu": 0.1, "max_fraction": 1.0, "value": -1.0,
    "factor": 0.4, "end": 0.2, "start": 0.5, "steps": 7, "peak": 0.5, "lora": False, "hidden_size": 2048, "current": 6,
}  # fmt: skip
SUM_NORM = "seq-mean-token-sum-norm"
# Other arguments and settings of a function, and what its settings are changed to where that is not OTHER's value.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "losses.clip_cov": ({"cov_low": 0.0}, {}), "losses.opsm": ({}, {"delta": 0.5}),
    "losses.rec": ({"clip_mode": "ring", "weight": "advantage", "regularizer": "k2", "regularizer_coef": 0.2}, {}),
    "losses.simpo": ({}, {"gamma": 1.4}),
    "advantages.opmd": ({"baseline": "logavgexp"}, {"baseline": "mean"}),
    "advantages.reinforce": ({"normalize": True}, {}), "advantages.rec": ({"normalize": True}, {"ddof": 1}),
    "advantages.gdpo": ({"rewards": [R, V]}, {"weights": [1.0, 3.0]}),
    "advantages.pkpo": ({"rewards": G, "k": 2}, {"baseline": "none", "k": 3}),
    "advantages.gigpo": ({"rewards": [[0.1, 1.0], [0.3, 0.2], [0.9]], "states": [["a", "b"], ["a", "b"], ["a"]]}, {}),
    "advantages.hierarchical_grpo": ({"rewards": [1.0, 0.0, 0.7], "roles": ["a", "a", "b"], "groups": ["g"] * 3}, {}),
    "advantages.gae": ({}, {"values": R}), "advantages.reinforce_pp": ({"kl": V, "kl_coef": 0.1}, {"kl": R}),
    "advantages.remax": ({}, {"baseline": 0.7}), "advantages.length_adaptive_lambda": ({"lengths": [30, 50]}, {}),
    "advantages.token_weights": ({"lengths": [1, 2], "mode": SUM_NORM, "constant": 4.0}, {"constant": 9.0}),
    "corrections.sequence_tis": (SEQUENCES, {}), "corrections.sequence_mask": (SEQUENCES, {LOW: 0.3, HIGH: 2.4}),
    "corrections.geometric_sequence_mask": ({**SEQUENCES, LOW: 0.7, HIGH: 1.6}, {}),
    "corrections.divergence_rejection": (
        {"threshold": 0.09, "estimator": "k2"}, {"level": "sequence-sum", "estimator": "k3"},
    ),
    "corrections.top_entropy": ({}, {"fraction": 0.7}), "corrections.clip_v": ({"mu": 0.1}, {"mu": 3.0}),
    "metrics.clip_fraction": ({}, {LOW: 0.5, HIGH: 1.6}),
    "metrics.token_lag": ({"versions": [[1, 2], [3]], "current": 4}, {"versions": [[2, 2], [3]]}),
    "metrics.group_informativeness": ({"rewards": [[0.0, 0.0], [0.3, 0.3], [1.0, 1.0], [1.0, 0.0]]}, {"high": 0.3}),
    "filters.difficulty_band": ({"rewards": [[0.2, 0.2], [0.9, 0.9]]}, {}),
    "filters.dynamic_sampling": (
        {"rewards": [[1.0, 0.0], [1.0, 1.0], [0.5, 0.0], [0.0, 1.0]], "needed": 3},
        {"correct": 0.5, "needed": 1, "keep_when_insufficient": True},
    ),
    "filters.overlong": ({"lengths": [3, 7]}, {}),
    "filters.stale": ({"versions": [1, 3, 5], "current": 5, "max_lag": 2}, {"max_lag": 4}),
    "rewards.affine": ({}, {"scale": 2.0, "bias": 0.25}), "rewards.clamp": ({"high": 3.0}, {}),
    "rewards.cosine_length": (
        {"correct": [True, False, True], "lengths": [3, 4, 9]},
        {"right": (2.0, 1.0), "wrong": (-3.0, 0.0), "exceeded": -9.0},
    ),
    "rewards.mapping": ({"table": {1: 5.0}, "default": 0.0}, {"default": -1.0}),
    "rewards.nonterminal_override": ({"rewards": [0.6, 0.3]}, {}),
    "rewards.nonterminal_reward": ({"rewards": [[0.6], [0.3]]}, {}),
    "rewards.overlong_penalty": ({"lengths": [3, 6, 7], "buffer": 4}, {"buffer": 3}),
    "rewards.repetition_penalty": ({"tokens": [[1, 2, 1, 2, 1, 2]]}, {"ngram": 1}),
    "rewards.stop_properly": ({"rewards": [1.0, 0.5], "truncated": [True, False]}, {}),
    "rewards.think_format": ({"texts": ["<think>a</think>", "a</think>", "[a]"]}, {"tags": ("[", "]"), "opened": True}),
    "schedules.constant": ({"value": 0.1}, {}), "schedules.lr_for": ({"hidden_size": 4096}, {}),
    **{f"schedules.{name}": ({"steps": 9}, {}) for name in ("cosine", "linear", "warmup")},
    "schedules.chord_schedule": (
        {"warmup_steps": 4, "decay_steps": 9}, {"warmup_steps": 8, "decay_steps": 12, "valley": 0.2},
    ),
    "schedules.wsd": (
        {"peak": 1.0, "steps": 10, "warmup_steps": 3, "decay_steps": 4}, {"warmup_steps": 2, "decay_steps": 5},
    ),
}  # fmt: skip
FUNCTIONS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": function
    for module in (losses, adv, corrections, metrics, filters, rewards, schedules)
    for name, function in getattr(module, "registry", vars(module)).items()
    if name in module.__all__ and inspect.isfunction(function)
}
DATA = {"trainer_logprobs", "sampling_logprobs", "reference_logprobs", "teacher_logprobs", "entropy", "logprobs"}
DATA |= {"advantages", "sum_p2", "sum_p2_logp", "lengths", "values", "log_ratios", "potentials", "weights", "rng"}
EXEMPT = {  # settings that are told apart elsewhere, or are not of this kind
    "advantages.pass_at_k": {"method", "k"},  # go together: method="analytic" needs k
    "advantages.pkpo": {"singleton"},  # k is at most the size of the smallest group
    "advantages.rec": {"drop"},  # drops at random
    "advantages.token_weights": {"groups"},  # with mode="prompt-mean" alone, where constant is refused
}


def flatten(result: Any) -> np.ndarray:
    """Return everything that a result holds, as one array."""
    if isinstance(result, filters.Selection):
        return np.append(result.keep.astype(float), sorted(result.dropped.values()))
    if isinstance(result, Mapping):
        result = [*result.values()]
    elif hasattr(result, "update"):  # running statistics
        result = [result.update(x) for x in ([1.0, 3.0, 7.0], [2.0], [5.0])]
    if isinstance(result, (list, tuple)):
        return np.concatenate([flatten(x) for x in result])
    return np.nan_to_num(np.ravel(np.asarray(result, float)), nan=-1e9)


def runner(name: str, given: dict[str, Any]) -> Callable[..., np.ndarray]:
    """Return the function whose keyword arguments are settings: value and gradient of a loss, some way off-policy."""
    module, _, short = name.partition(".")
    if module == "losses":
        driver, inputs = example(short, np.random.default_rng(3), (30, 16, 24, 20, 3, 9), spread=0.6)
        return lambda **settings: flatten(call(short, driver, inputs, {**given, **settings})[:2])
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    needed = {key: GIVEN[key] for key, p in parameters.items() if p.default is p.empty and key in GIVEN} | given
    if "step" in parameters:
        return lambda **settings: flatten([FUNCTIONS[name](step, **{**needed, **settings}) for step in range(1, 12, 2)])
    return lambda **settings: flatten(FUNCTIONS[name](**{**needed, **settings}))


@for_each("name", sorted(FUNCTIONS))
def test_each_setting_changes_the_result_in_its_own_way(name: str) -> None:
    """Losses, estimators, corrections, metrics, filters, rewards and schedules; a setting that is added, too."""
    given, others = CASES.get(name, ({}, {}))
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    keys = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - DATA - EXEMPT.get(name, set()) | others.keys()
    if not keys:
        return
    run = runner(name, given)
    results = {"nothing": run()} | {key: run(**{key: (OTHER | others)[key]}) for key in sorted(keys)}
    for (a, x), (b, y) in itertools.combinations(results.items(), 2):
        same = x.shape == y.shape and np.allclose(x, y, rtol=1e-9, atol=1e-12)
        assert not same, f"changing {b} gives what changing {a} gives"


def test_the_table_is_of_what_exists() -> None:
    assert CASES.keys() | EXEMPT.keys() <= FUNCTIONS.keys()
    assert len(FUNCTIONS) > 100
