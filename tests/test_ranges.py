"""Ranges: the ends of a closed one are allowed, and what lies next beyond them is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlkit import advantages, corrections, filters, metrics, rewards, schedules
from rlkit.errors import ConfigError, DataError, RlkitError
from tests.each import for_each

RATIOS = {"trainer_logprobs": [-1.0, -2.0], "sampling_logprobs": [-1.5, -1.0]}
SCORES = {"entropy": [0.5, 1.0], "logprobs": [-0.5, -1.0], "advantages": [-1.0, -1.0]}
SUMS = {"sum_p2": [0.5, 0.6], "sum_p2_logp": [-0.3, -0.2]}
BIG = 1e150
UP, DOWN = np.nextafter(0.0, 1.0), np.nextafter(0.0, -1.0)
# the function, what it is called with, the setting, ends that are allowed, what is refused
RANGES: list[tuple[Callable[..., Any], dict[str, Any], str, list[Any], list[Any]]] = [
    (filters.overlong, {"lengths": [0, 3]}, "max_length", [0, 1], [-1, 0.5, True]),
    (filters.overlong, {"max_length": 3}, "lengths", [[0], [BIG]], [[DOWN], [2 * BIG]]),
    (filters.stale, {"versions": [0], "max_lag": 0}, "current", [0, 1], [-1, 0.5]),
    (filters.stale, {"versions": [0], "current": 0}, "max_lag", [0, 1], [-1, 0.5]),
    (filters.stale, {"max_lag": 1, "current": 3}, "versions", [[0], [3]], [[-1], [4]]),
    (filters.difficulty_band, {"rewards": [[0.5, 0.5]], "high": 0.5}, "low", [0.5], [0.5000001, np.nan]),
    (filters.zero_variance, {"rewards": [[0.0, 1.0]]}, "threshold", [0.0, 0], [DOWN, np.inf]),
    (filters.dynamic_sampling, {"rewards": [[0.0, 1.0]]}, "needed", [1], [0, 1.0]),
    (metrics.pass_at_k, {"n": 3, "c": 1}, "k", [1, 3], [0, 4, 1.0]),
    (metrics.pass_at_k, {"n": 3, "k": 2}, "c", [0, 3], [-1, 4]),
    (metrics.pass_at_k, {"n": [3], "k": 2}, "c", [[0], [3]], [[-1], [4], [0.5], [1, 1]]),
    (metrics.pass_at_k, {"c": [1], "k": 2}, "n", [[2]], [[1]]),
    (metrics.group_informativeness, {"rewards": [[0.0, 1.0]], "high": 0.5}, "low", [0.4, -3.0], [0.5, np.nan]),
    (metrics.clip_fraction, RATIOS, "clip_low_threshold", [0.0, 1.0], [DOWN, 1.1]),
    (corrections.token_tis, RATIOS, "clip_low_threshold", [0.0, 1.0], [DOWN, 1.1]),
    (corrections.clamp, RATIOS, "bound", [UP, 300.0], [0.0, 300.1]),
    (corrections.divergence_rejection, RATIOS, "threshold", [0.0], [DOWN]),
    (corrections.top_entropy, {"entropy": [0.5, 1.0]}, "fraction", [UP, 1.0], [0.0, 1.0000001]),
    (corrections.clip_b, SCORES, "mu", [0.0], [DOWN, np.inf]),
    (corrections.clip_v, {**SCORES, **SUMS}, "mu", [0.0], [DOWN, np.inf]),
    (corrections.clip_v, {**SCORES, **SUMS}, "max_fraction", [0.0, 1.0], [DOWN, 1.0000001]),
    (corrections.clip_v, {**SCORES, "sum_p2": [0.5, 0.6]}, "sum_p2_logp", [[0.0, -BIG]], [[0.0, -2 * BIG]]),
    (rewards.cosine_length, {"correct": [True], "lengths": [1]}, "max_length", [1], [0, 1.5]),
    (rewards.cosine_length, {"correct": [True], "max_length": 2}, "lengths", [[0], [BIG]], [[DOWN], [2 * BIG]]),
    (rewards.length_cost, {"lengths": [1]}, "max_length", [1], [0]),
    (rewards.length_cost, {"lengths": [1], "max_length": 3}, "coef", [0.0], [DOWN]),
    (rewards.overlong_penalty, {"lengths": [1], "max_length": 3}, "buffer", [1, 3], [0, 4]),
    (rewards.overlong_penalty, {"lengths": [1], "max_length": 3, "buffer": 1}, "factor", [0.0], [DOWN]),
    (rewards.repetition_penalty, {"tokens": [[1, 2]]}, "ngram", [1], [0]),
    (rewards.repetition_penalty, {"tokens": [[1, 2]]}, "factor", [0.0], [DOWN]),
    (rewards.stop_properly, {"rewards": [1.0], "truncated": [True]}, "coef", [1.0, -BIG], [1.0000001, -2 * BIG]),
    (rewards.whitening, {"rewards": [1.0, 2.0]}, "eps", [0.0], [DOWN]),
    (rewards.whitening, {"rewards": [1.0, 2.0]}, "ddof", [0, 1], [-1, 2]),
    (rewards.stop_properly, {"truncated": [True]}, "rewards", [[BIG]], [[2 * BIG], [np.inf]]),
    (rewards.repetition_penalty, {}, "tokens", [[[1, 2]], [[]]], [[[1, 2], 3], [], 3]),
    (
        rewards.nonterminal_reward,
        {"rewards": [[1.0]], "finished": [True]},
        "value",
        [-BIG, BIG],
        [-2 * BIG, 2 * BIG],
    ),
    (rewards.affine, {"rewards": [1.0]}, "bias", [-BIG, BIG], [-2 * BIG, 2 * BIG]),
    (rewards.think_format, {"texts": ["a"]}, "tags", [("<", ">")], [("", ">"), ("<", 1), ("<",)]),
    *[
        (function, given, "step", [0], [-1, 0.5])
        for function, given in (
            (schedules.constant, {"value": 1.0}),
            (schedules.linear, {"start": 1.0, "end": 0.0, "steps": 3}),
            (schedules.cosine, {"start": 1.0, "steps": 3}),
            (schedules.warmup, {"steps": 3}),
            (schedules.wsd, {"peak": 1.0, "steps": 9, "decay_steps": 3}),
            (schedules.chord_schedule, {"warmup_steps": 2, "decay_steps": 3}),
        )
    ],
    (schedules.wsd, {"step": 0, "peak": 1.0, "steps": 9, "decay_steps": 3}, "warmup_steps", [0, 6], [-1, 0.5]),
    (schedules.wsd, {"step": 0, "peak": 1.0, "steps": 9}, "decay_steps", [0, 9], [-1, 10]),
    (schedules.chord_schedule, {"step": 1, "decay_steps": 3}, "warmup_steps", [0], [-1]),
    (schedules.chord_schedule, {"step": 1, "warmup_steps": 2}, "decay_steps", [0], [-1]),
    (schedules.chord_schedule, {"step": 1, "warmup_steps": 2, "decay_steps": 3}, "valley", [0.0, 0.9], [DOWN, 1.1]),
    (schedules.chord_schedule, {"step": 1, "warmup_steps": 2, "decay_steps": 3}, "peak", [1.0, 0.05], [1.1, DOWN]),
]


@for_each("row", RANGES, ids=[f"{row[0].__name__}-{row[2]}" for row in RANGES])
def test_ends(row: Any) -> None:
    """Each end is inside, or outside, as the docstring says."""
    function, given, name, allowed, refused = row
    for value in allowed:
        function(**given, **{name: value})
    for value in refused:
        with pytest.raises(RlkitError, match=rf"^(n|{name})\b") as caught:
            function(**given, **{name: value})
        assert isinstance(caught.value, (ConfigError, DataError))


def test_what_is_on_an_end_counts_as_inside() -> None:
    """Rewards on a band's bounds, and a deviation on the threshold."""
    assert filters.difficulty_band([[0.1, 0.1], [0.9, 0.9]], low=0.1, high=0.9).keep.tolist() == [True, True]
    spread = float(np.std([0.0, 1.0], ddof=1))
    assert filters.zero_variance([[0.0, 1.0]], threshold=spread).keep.tolist() == [False]
    assert filters.overlong([0], max_length=0).keep.tolist() == [True]
    score = corrections.clip_b(entropy=[0.5, 1.0], logprobs=[-0.5, -1.0], advantages=[-1.0, -1.0], mu=1.0)
    assert score.tolist() == [1.0, 1.0]  # of two scores each is one deviation from the mean, the lower on the bound


def test_sequences_of_one_token() -> None:
    """A mean over one token is that token's value, and nothing at a threshold of 0 is off it without a difference."""
    one = {"trainer_logprobs": [[-1.0], [-3.0]], "sampling_logprobs": [[-1.5], [-1.0]]}
    bounds = {"clip_low_threshold": 0.2, "clip_high_threshold": 1.5}
    kept = [row.tolist() for row in corrections.geometric_sequence_mask(**one, **bounds)]
    assert kept == [[0.0], [0.0]], "ratios of 1.65 and 0.135"
    half = [
        row.tolist()
        for row in corrections.divergence_rejection(**one, level="sequence-mean", estimator="k2", threshold=0.125)
    ]
    assert half == [[1.0], [0.0]], "0.5 * 0.5 ** 2 is on the threshold"
    less = corrections.divergence_rejection(**one, level="sequence-mean", estimator="k2", threshold=0.1)
    assert [row.tolist() for row in less] == [[0.0], [0.0]]
    same = {"trainer_logprobs": [-1.0, -2.0], "sampling_logprobs": [-1.0, -2.0]}
    for level in ("token", "sequence-max", "sequence-mean", "sequence-sum"):
        assert corrections.divergence_rejection(**same, level=level, threshold=0.0).tolist() == [1.0, 1.0]


def test_groups_of_one() -> None:
    """A group of one reward has a mean, and lies in a band or not; it counts among the groups."""
    assert filters.difficulty_band([[0.5], [0.9]], high=0.6).keep.tolist() == [True, False]
    assert metrics.group_informativeness([[1.0], [0.0, 1.0]]) == {"zero": 0.5, "too_easy": 0.5, "too_hard": 0.0}


def test_running_baselines_are_finite() -> None:
    """A baseline whose square no float64 holds is refused in either direction."""
    assert advantages.RunningBaseline(baselines={"": BIG}).baselines == {"": BIG}
    for value in (2 * BIG, -2 * BIG, np.inf, np.nan):
        with pytest.raises(ConfigError, match=r"^baselines\[''\]"):
            advantages.RunningBaseline(baselines={"": value})


def test_one_problem_or_many() -> None:
    """``n`` and ``c`` are both numbers or both arrays."""
    for n, c in ((4, [1, 2]), ([4, 4], 1)):
        with pytest.raises(DataError, match=r"^[nc]: "):
            metrics.pass_at_k(n, c, 2)


def test_selections_are_themselves() -> None:
    """Selections are compared by identity, since their arrays have no one truth value."""
    first, second = (filters.Selection([True], {}) for _ in range(2))  # type: ignore[arg-type]
    assert first == first
    assert first != second
    assert len({first, second}) == 2


def test_the_first_unknown_reward_is_named() -> None:
    """Of several."""
    with pytest.raises(DataError, match=r"^rewards\[1\]: is 0.5"):
        rewards.mapping([1.0, 0.5, 0.25], {1.0: 1.0})


def test_rows_of_any_form() -> None:
    """Lists of lists of different lengths are as good as arrays."""
    lists = {"entropy": [[0.5], [1.0, 0.2]], "logprobs": [[-0.5], [-1.0, -0.1]], "advantages": [[-1.0], [-1.0, 1.0]]}
    sums = {"sum_p2": [[0.5], [0.6, 0.9]], "sum_p2_logp": [[-0.3], [-0.2, -0.1]]}
    flat = {name: np.concatenate(rows) for name, rows in {**lists, **sums}.items()}
    ragged = np.concatenate(corrections.clip_v(**lists, **sums, mu=0.5))
    assert ragged.tolist() == corrections.clip_v(**flat, mu=0.5).tolist()


def test_schedules_at_their_corners() -> None:
    """The first step is 0; at the end of warming up the peak is reached, where decay begins it still stands."""
    wsd = [schedules.wsd(k, peak=1.0, steps=9, warmup_steps=3, decay_steps=4, end=0.2) for k in range(11)]
    assert max(wsd) == 1.0
    assert wsd[5] == 1.0
    assert wsd[6] < 1.0
    assert wsd[9] == wsd[10] == pytest.approx(0.2)
    assert wsd[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_rewards_are_not_written_to() -> None:
    """What is given stays as it is."""
    given = np.array([1.0, 2.0, np.nan, 4.0])
    before = given.copy()
    for function in (rewards.whitening, lambda r: rewards.affine(r, scale=2.0), lambda r: rewards.clamp(r, low=1.5)):
        function(given)
        np.testing.assert_array_equal(given, before)


def test_statistics_of_few_ratios() -> None:
    """One token, and tokens of one ratio, have no spread; two have the unbiased one."""
    assert metrics.ratio_statistics(trainer_logprobs=[-1.0], sampling_logprobs=[-2.0])["std"] == 0.0
    assert metrics.ratio_statistics(trainer_logprobs=[-1.0] * 3, sampling_logprobs=[-1.1] * 3)["std"] == 0.0
    two = metrics.ratio_statistics(trainer_logprobs=[np.log(0.5), np.log(0.5)], sampling_logprobs=[0.0, np.log(0.25)])
    assert two["std"] == pytest.approx(1.5 / np.sqrt(2))


def test_effective_sample_size_of_far_ratios() -> None:
    """A common factor of the weights does not matter, however large it is."""
    near = metrics.effective_sample_size(trainer_logprobs=[-1.0, -2.0], sampling_logprobs=[-2.0, -2.0])
    far = metrics.effective_sample_size(trainer_logprobs=[-1.0, -2.0], sampling_logprobs=[-802.0, -802.0])
    assert near == pytest.approx(far)
