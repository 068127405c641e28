"""Laws of the group estimators, over random batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import rlkit.advantages as adv
from rlkit.errors import ConfigError
from tests.each import for_each
from tests.properties import examples

pytestmark = pytest.mark.filterwarnings("ignore:rewards. every group has one member")
NAN = float("nan")
laws = examples(50)
rewards = st.floats(-100, 100).map(lambda x: round(x, 3))
groups = st.lists(rewards, min_size=2, max_size=12)
batches = st.lists(st.lists(rewards | st.just(NAN), min_size=1, max_size=8), min_size=1, max_size=6)

LOCAL: dict[str, Callable[[Any], Any]] = {
    "grpo": adv.grpo,
    "dr_grpo": adv.dr_grpo,
    "rloo": adv.rloo,
    "loo_std": adv.loo_std,
    "reinforce": adv.reinforce,
    "opmd": lambda r: adv.opmd(r, baseline="logavgexp"),
    "asymre": adv.asymre,
    "rec": lambda r: adv.rec(r, normalize=True),
    "maxrl": adv.maxrl,
}


def flat(result: Any) -> np.ndarray:
    return np.concatenate(result) if isinstance(result, list) else np.ravel(result)


def varied(group: list[float]) -> bool:
    return max(group) - min(group) > 1e-2


@laws
@given(batches, st.sampled_from(sorted(LOCAL)), st.randoms(use_true_random=False))
def test_permutation_equivariant(batch: list[list[float]], name: str, random: Any) -> None:
    """Shuffling within groups and among groups shuffles the advantages, and changes none of them."""
    estimator = LOCAL[name]
    before = estimator(batch)
    order = random.sample(range(len(batch)), len(batch))
    inner = [random.sample(range(len(group)), len(group)) for group in batch]
    shuffled = [[batch[g][i] for i in inner[g]] for g in order]
    after = estimator(shuffled)
    for place, g in enumerate(order):
        np.testing.assert_allclose(after[place], np.asarray(before[g])[inner[g]], rtol=1e-9, atol=1e-9)


@laws
@given(batches, st.sampled_from(sorted(LOCAL)))
def test_groups_do_not_see_each_other(batch: list[list[float]], name: str) -> None:
    """Each group of a batch gets what it gets alone, bit for bit, and an unscored reward gets 0."""
    result = LOCAL[name](batch)
    for group, row in zip(batch, result, strict=True):
        np.testing.assert_array_equal(row, LOCAL[name](group))
        assert (np.asarray(row)[np.isnan(group)] == 0.0).all()
        assert np.isfinite(row).all()


@laws
@given(groups, st.integers(1, 4), st.sampled_from(sorted(LOCAL)))
def test_unscored_rewards_count_nowhere(group: list[float], unscored: int, name: str) -> None:
    """Adding samples that could not be scored leaves the others' advantages as they were."""
    longer = [NAN, *group, *[NAN] * unscored]
    result = LOCAL[name](longer)
    np.testing.assert_allclose(result[1 : len(group) + 1], LOCAL[name](group), rtol=1e-12, atol=1e-12)


@laws
@given(groups, st.floats(-50, 50), st.floats(0.1, 10))
def test_grpo_shift_and_scale(group: list[float], shift: float, scale: float) -> None:
    """GRPO with eps=0 does not change when rewards are shifted or scaled; centring alone scales along."""
    assume(varied(group))
    r = np.array(group)
    np.testing.assert_allclose(adv.grpo(r * scale + shift, eps=0.0), adv.grpo(r, eps=0.0), atol=1e-6)
    np.testing.assert_allclose(adv.dr_grpo(r * scale + shift), scale * adv.dr_grpo(r), atol=1e-9)
    np.testing.assert_allclose(adv.rloo(r * scale + shift), scale * adv.rloo(r), atol=1e-9)


@laws
@given(groups)
def test_grpo_moments(group: list[float]) -> None:
    """GRPO advantages sum to 0, and with eps=0 their squares to N - 1."""
    assume(varied(group))
    a = adv.grpo(group, eps=0.0)
    assert abs(a.sum()) < 1e-9
    assert (a @ a) == pytest.approx(len(group) - 1)
    assert (adv.grpo(group, eps=0.0, ddof=0) ** 2).mean() == pytest.approx(1.0)


def test_an_offset_changes_no_bit() -> None:
    """Deviations are formed from differences, so an offset that leaves the rewards exact leaves no trace."""
    rewards = np.array([0.0, 1.0, 3.0, 4.0, 4.0, 9.0])
    estimators = {
        **{name: LOCAL[name] for name in ("grpo", "dr_grpo", "rloo", "loo_std", "rec")},
        "grpo, batch": lambda r: adv.grpo(r, scale="batch"),
        "reinforce": lambda r: adv.reinforce(r, normalize=True),
        "rebn": adv.rebn,
        "opo": lambda r: adv.opo(r, lengths=[1, 2, 3, 4, 5, 6]),
        "pkpo": lambda r: adv.pkpo(r, k=3),
    }
    for name, estimator in estimators.items():
        np.testing.assert_array_equal(estimator(rewards + 2.0**52), estimator(rewards), err_msg=name)


def test_batch_scale_by_hand() -> None:
    """scale="batch" divides by the deviation of all rewards, about their own mean: 2, 4, 6, 4 have sqrt(8 / 3)."""
    found = adv.grpo([[2.0, 4.0], [6.0, 4.0]], scale="batch", eps=0.0)
    np.testing.assert_allclose(found, np.array([[-1.0, 1.0], [1.0, -1.0]]) / np.sqrt(8 / 3), rtol=1e-12)
    np.testing.assert_array_equal(adv.grpo([NAN, NAN], scale="batch"), [0.0, 0.0])


@laws
@given(groups)
def test_rloo_is_leave_one_out(group: list[float]) -> None:
    """RLOO is the reward minus the mean of the others, and N / (N - 1) times the centred reward."""
    n = len(group)
    explicit = [r - (sum(group) - r) / (n - 1) for r in group]
    np.testing.assert_allclose(adv.rloo(group), explicit, atol=1e-9)
    np.testing.assert_allclose(adv.rloo(group), n / (n - 1) * adv.dr_grpo(group), atol=1e-9)


@laws
@given(groups, st.integers(1, 50))
def test_opo_of_equal_lengths_is_the_mean(group: list[float], length: int) -> None:
    """OPO's baseline is the plain mean where all samples are equally long."""
    np.testing.assert_allclose(adv.opo(group, lengths=[length] * len(group)), adv.dr_grpo(group), atol=1e-9)


def test_opo_of_few_tokens() -> None:
    """A single token in a group is enough for a baseline, which then is that sample's reward."""
    np.testing.assert_array_equal(adv.opo([1.0, 0.0], lengths=[1, 0]), [0.0, -1.0])


@laws
@given(groups, st.floats(-50, 50))
def test_one_token_each_is_whitening(group: list[float], shift: float) -> None:
    """reinforce_pp_baseline of samples of one token whitens what dr_grpo gives; n tokens are n samples."""
    centred = adv.dr_grpo([group, [shift, 0.5]])
    found = adv.reinforce_pp_baseline([group, [shift, 0.5]], lengths=[[1] * len(group), [1, 1]], eps=1e-3)
    np.testing.assert_allclose(flat(found), flat(adv.reinforce(centred, normalize=True, eps=1e-3)), atol=1e-9)


def test_gpg_counts_scored_groups() -> None:
    """A group without a scored reward is no group; a reward that is not scored is no reward."""
    batch = [[1.0, 0.0], [0.0, 0.0], [NAN, NAN]]
    np.testing.assert_array_equal(adv.gpg(batch, count="groups")[0], [1.0, -1.0])  # 2 groups, 1 with signal
    np.testing.assert_array_equal(adv.gpg(batch)[0], [2.0, -2.0])  # 4 rewards, 1 not zero
    for count in ("rewards", "groups"):
        np.testing.assert_array_equal(adv.gpg([[0.0, 0.0], [NAN, NAN]], count=count), np.zeros((2, 2)))


@laws
@given(groups, st.floats(0.1, 10), st.floats(1, 5))
def test_maxrl_scales_away_but_does_not_shift(group: list[float], scale: float, shift: float) -> None:
    """MaxRL does not change when rewards >= 0 are scaled, and does when they are shifted."""
    r = np.abs(group)
    assume(r.max() - r.min() > 1e-2)
    np.testing.assert_allclose(adv.maxrl(r * scale), adv.maxrl(r), rtol=1e-6, atol=1e-9)
    assert not np.allclose(adv.maxrl(r + shift), adv.maxrl(r), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("group", [[0.1, 0.2, -0.3], [1.0, -1.0], [1e9, -1e9, 1e-9], [0.0, -0.0]])
def test_maxrl_near_zero(group: list[float]) -> None:
    """A mean that is 0 up to rounding does not blow up: it counts as not positive."""
    np.testing.assert_array_equal(adv.maxrl(group), np.zeros(len(group)))


@laws
@given(groups)
def test_opmd_interpolates(group: list[float]) -> None:
    """The tempered baseline lies between the mean and the best reward, which are its limits."""
    cold = np.array(group) - adv.opmd(group, baseline="logavgexp", tau=1e-3)
    warm = np.array(group) - adv.opmd(group, baseline="logavgexp", tau=1e5)
    np.testing.assert_allclose(cold, max(group), atol=1e-2)
    np.testing.assert_allclose(warm, np.mean(group), atol=0.2)


@laws
@given(st.lists(rewards, min_size=2, max_size=9), st.data())
def test_pkpo_laws(group: list[float], data: st.DataObject) -> None:
    """pkpo sums to k times the mean best of k; of all is RLOO-like: only the best gains, by its lead."""
    k = data.draw(st.integers(2, len(group)))
    total = adv.pkpo(group, k=k, baseline="none").sum()
    shifted = adv.pkpo(np.array(group) + 5.0, k=k, baseline="none").sum()
    assert shifted - total == pytest.approx(5.0 * k)
    gain = adv.pkpo(group, k=k)
    assert (gain >= 0).all()
    ranked = sorted(group)
    everyone = adv.pkpo(group, k=len(group))
    assert everyone.sum() == pytest.approx(ranked[-1] - ranked[-2], abs=1e-9)


@laws
@given(st.lists(st.booleans(), min_size=2, max_size=10), st.data())
def test_pass_at_k_analytic_is_centred(right: list[bool], data: st.DataObject) -> None:
    """Analytic pass@k advantages sum to 0, are >= 0 for right samples and <= 0 for wrong ones; k=1 is GRPO, biased."""
    group = np.array(right, float)
    k = data.draw(st.integers(1, len(right)))
    a = adv.pass_at_k(group, method="analytic", k=k)
    assert abs(a.sum()) < 1e-9
    assert (a[group == 1] >= 0).all()
    assert (a[group == 0] <= 1e-12).all()
    np.testing.assert_allclose(
        adv.pass_at_k(group, method="analytic", k=1), adv.grpo(group, ddof=0, eps=0.0), atol=1e-9
    )


def test_pass_at_k_of_many() -> None:
    """Binomials of thousands do not overflow."""
    group = np.zeros(4000)
    group[:40] = 1.0
    assert np.isfinite(adv.pass_at_k(group, method="analytic", k=1000)).all()
    assert np.isfinite(adv.pkpo(np.arange(3000.0), k=500)).all()


def test_pass_at_k_ties() -> None:
    """Two best samples: nobody leads. Fewer scored rewards than k: no subset, so 0."""
    np.testing.assert_array_equal(adv.pass_at_k([1.0, 1.0, 0.0]), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(adv.pass_at_k([1.0, 0.0, NAN], method="analytic", k=3), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(adv.pkpo([1.0, 0.0, NAN], k=3), [0.0, 0.0, 0.0])


def test_rec_balance() -> None:
    """Balance drops the surplus of samples below the mean, by the given generator, and centres on the rest."""
    batch = [[1.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.5, 0.5]]
    result = adv.rec(batch, drop="balance", rng=np.random.default_rng(3))
    assert sorted(result[0].tolist()) == [-0.5, 0.0, 0.0, 0.0, 0.5]
    np.testing.assert_allclose(result[1], [1 / 3, 1 / 3, -2 / 3])
    np.testing.assert_array_equal(result[2], [0.0, 0.0])
    again = adv.rec(batch, drop="balance", rng=np.random.default_rng(3))
    np.testing.assert_array_equal(flat(result), flat(again))
    dropped = {
        tuple(np.flatnonzero(adv.rec(batch, drop="balance", rng=np.random.default_rng(s))[0] < 0)) for s in range(40)
    }
    assert dropped == {(1,), (2,), (3,), (4,)}


@laws
@given(batches, st.integers(0, 9))
def test_rec_balance_of_each_group(batch: list[list[float]], seed: int) -> None:
    """In each group as many are dropped as more lie below the mean than not, and the rest is centred on itself.

    A reward equal to the mean does not lie below it.
    """
    batch = [[*group, sum(group) / len(group)] if np.isfinite(group).all() else group for group in batch]
    result = adv.rec(batch, drop="balance", rng=np.random.default_rng(seed))
    for group, row in zip(batch, result, strict=True):
        scored = np.array([r for r in group if not np.isnan(r)])
        below = int((adv.dr_grpo(scored) < 0).sum()) if scored.size else 0
        surplus = max(2 * below - scored.size, 0)
        assert abs(np.sum(row)) < 1e-9
        if surplus == 0:
            np.testing.assert_array_equal(row, adv.dr_grpo(group))
        elif np.unique(scored).size == scored.size and scored.max() - scored.min() > 1e-2:
            rest = scored.size - surplus
            kept = np.asarray(row) != 0
            assert rest - 1 <= kept.sum() <= rest  # one of them may lie on the mean
    found = adv.rec([0.0, 1.0, 0.5, 0.5, 0.5], drop="balance", rng=np.random.default_rng(0))
    assert found.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0]


@for_each("name", ["grpo", "dr_grpo", "rloo", "loo_std", "gpg", "opmd", "asymre", "rec", "maxrl", "pkpo"])
def test_singleton(name: str) -> None:
    """A group of one scored reward gets 0, its reward, or an error, as asked; a group of none gets 0."""
    settings: dict[str, Any] = {"k": 1, "baseline": "none"} if name == "pkpo" else {}
    batch = [[2.0], [NAN, 3.0], [NAN], [1.0, 0.0]]
    function = adv.registry[name]
    assert [row.tolist() for row in function(batch, **settings)[:3]] == [[0.0], [0.0, 0.0], [0.0]]
    raw = function(batch, singleton="raw", **settings)
    assert [row.tolist() for row in raw[:3]] == [[2.0], [0.0, 3.0], [0.0]]
    with pytest.raises(ValueError, match=r"^rewards\[0\]"):
        function(batch, singleton="error", **settings)
    assert np.isfinite(flat(function([[NAN, NAN], [1.0, 0.0]], singleton="error", **settings))).all()


def test_loo_std_of_an_outlier() -> None:
    """The deviation of the others is exact where one reward is a million times larger than they differ."""
    group = [1e9, 0.1, 0.2, 0.4]
    rest = np.array(group[1:])
    expected = (group[0] - rest.mean()) / rest.std(ddof=1)
    assert adv.loo_std(group, eps=0.0)[0] == pytest.approx(expected, rel=1e-12)


@laws
@given(batches, st.floats(0.1, 10), st.floats(-5, 5))
def test_gdpo_components_weigh_alike(batch: list[list[float]], scale: float, shift: float) -> None:
    """The scale and the offset of a component do not matter to gdpo (eps=0)."""
    one = [np.array(group) for group in batch]
    two = [np.cos(10 * group) for group in one]
    moved = [group * scale + shift for group in two]
    assume(all(np.nanmax(g) - np.nanmin(g) > 1e-2 for g in (*one, *two) if np.isfinite(g).sum() > 1))
    before, after = adv.gdpo([one, two], eps=0.0), adv.gdpo([one, moved], eps=0.0)
    np.testing.assert_allclose(flat(after), flat(before), atol=1e-5)


@laws
@given(batches, st.floats(-30, 30))
def test_gdpo_weights_are_relative(batch: list[list[float]], power: float) -> None:
    """Only the ratio of the weights matters to gdpo (eps=0), however small they are."""
    one = [np.array(group) for group in batch]
    two = [np.cos(10 * group) for group in one]
    plain, scaled = (adv.gdpo([one, two], weights=[1.0 * by, 0.5 * by], eps=0.0) for by in (1.0, 10.0**power))
    np.testing.assert_allclose(flat(scaled), flat(plain), atol=1e-6)


def test_gdpo_of_an_array() -> None:
    """Components may be the rows of one array."""
    rewards = np.array([[1.0, 0.0, 0.5], [0.0, 10.0, 3.0]])
    np.testing.assert_array_equal(adv.gdpo(rewards), adv.gdpo(list(rewards)))


@pytest.mark.parametrize("size", [2, 3, 40, 333])
def test_max_second_of_many(size: int) -> None:
    """The lead of the best over the second best, wherever the two stand."""
    rewards = np.random.default_rng(size).normal(size=(5, size))
    found = adv.pass_at_k(rewards, scale="none")
    ranked = np.sort(rewards, axis=1)
    np.testing.assert_array_equal(found.max(axis=1), ranked[:, -1] - ranked[:, -2])
    assert (found.argmax(axis=1) == rewards.argmax(axis=1)).all()
    assert np.count_nonzero(found) == 5


def test_hierarchical_grpo_keeps_roles_and_groups_apart() -> None:
    """More roles than groups and more groups than roles: each pair has a mean of its own."""
    for roles, groups in ((3, 2), (2, 3), (5, 1), (1, 4)):
        pairs = [(role, group) for role in range(roles) for group in range(groups)] * 2
        rewards = np.arange(len(pairs)) ** 2.0
        found = adv.hierarchical_grpo(rewards, [role for role, _ in pairs], [group for _, group in pairs])
        half = (rewards[len(pairs) // 2 :] - rewards[: len(pairs) // 2]) / 2
        np.testing.assert_array_equal(found, np.concatenate([-half, half]))
    unscored = adv.hierarchical_grpo([1.0, NAN, 0.0], ["a", "a", "a"], ["q", "q", "q"])
    np.testing.assert_array_equal(unscored, [0.5, 0.0, -0.5])


def test_gigpo_singletons() -> None:
    """A state met once, and a single episode, contribute nothing."""
    np.testing.assert_array_equal(adv.gigpo([[1.0, 2.0]], [["a", "b"]]), [[0.0, 0.0]])
    np.testing.assert_array_equal(adv.gigpo([1.0, 2.0], ["a", "b"]), [0.0, 0.0])


def test_running_baseline() -> None:
    """A batch is scored against the baseline as it stood; unscored rewards move nothing; the state can be saved."""
    baseline = adv.RunningBaseline(decay=0.5)
    np.testing.assert_array_equal(baseline.update([2.0, 4.0, NAN], ["a", "a", "b"]), [2.0, 4.0, 0.0])
    assert baseline.baselines == {"a": 2.5}
    assert adv.RunningBaseline(decay=0.5, baselines={"a": 2.0}).update([NAN, 3.0], ["a", "a"]).tolist() == [0.0, 1.0]
    resumed = adv.RunningBaseline(decay=0.5, baselines=dict(baseline.baselines))
    np.testing.assert_array_equal(resumed.update([2.5], ["a"]), baseline.update([2.5], ["a"]))
    for bad in ({"decay": 1.5}, {"decay": -0.1}, {"decay": None}):
        with pytest.raises(ValueError, match="^decay"):
            adv.running_baseline(**bad)
    with pytest.raises(ValueError, match="^roles"):
        baseline.update([1.0, 2.0], ["a"])
    with pytest.raises(ValueError, match="^rewards"):
        baseline.update([[1.0, 2.0]], ["a"])


@laws
@given(st.lists(st.lists(rewards | st.just(NAN), min_size=1, max_size=6), min_size=1, max_size=6))
def test_running_normalization(batch: list[list[float]]) -> None:
    """After each call mean and deviation are those of everything seen so far."""
    running = adv.running_normalization(eps=1e-3)
    seen: list[float] = []
    for part in batch:
        seen += [r for r in part if not np.isnan(r)]
        result = running.update(part)
        expected = np.zeros(len(part))
        if len(seen) > 1 and max(seen) > min(seen):
            expected = np.nan_to_num((np.array(part) - np.mean(seen)) / (np.std(seen, ddof=1) + 1e-3))
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@laws
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), min_size=1, max_size=5))
def test_running_states_go_through_json(batch: list[list[float]]) -> None:
    """What update leaves behind is accepted again, and goes on as if nothing had happened."""
    for running in (adv.running_normalization(), adv.running_baseline(decay=0.9)):
        for part in batch:
            running.update(part)
            state = json.loads(json.dumps(attrs.asdict(running)))
            again = type(running)(**state)
            assert again == running
            np.testing.assert_array_equal(type(running)(**state).update([1.0, 3.0]), again.update([1.0, 3.0]))


def test_running_baseline_copies_its_state() -> None:
    """Two baselines made from one state do not move each other."""
    state = {"white": 0.5}
    adv.RunningBaseline(decay=0.5, baselines=state).update([1.0], ["white"])
    assert state == {"white": 0.5}


SEEN = {"count": 3, "mean": 4.0, "squares": 6.0, "lowest": 2.0, "highest": 5.0}


@for_each(
    ("kind", "state", "message"),
    [
        (adv.RunningBaseline, {"baselines": None}, "baselines: got None"),
        (adv.RunningBaseline, {"baselines": [1.0]}, "baselines: got"),
        (adv.RunningBaseline, {"baselines": {"a": "1"}}, r"baselines\['a'\]: got '1'"),
        (adv.RunningBaseline, {"baselines": {"a": float("nan")}}, r"baselines\['a'\]: got nan"),
        (adv.RunningBaseline, {"baselines": {"a": 0.0, 3: 1e151}}, r"baselines\[3\]: got 1e\+151"),
        (adv.RunningNormalization, {"ddof": 2}, "ddof"),
        (adv.RunningNormalization, {"eps": -1.0}, "eps"),
        (adv.RunningNormalization, {**SEEN, "count": 1.5}, "count: got 1.5"),
        (adv.RunningNormalization, {**SEEN, "count": -1}, "count: got -1"),
        (adv.RunningNormalization, {**SEEN, "count": 0}, "count: is 0"),
        (adv.RunningNormalization, {"mean": 1.0}, "count: is 0"),
        (adv.RunningNormalization, {"squares": 1.0}, "count: is 0"),
        (adv.RunningNormalization, {"lowest": 1.0, "highest": 1.0}, "count: is 0"),
        (adv.RunningNormalization, {**SEEN, "mean": None}, "mean: got None"),
        (adv.RunningNormalization, {**SEEN, "mean": float("nan")}, "mean: got nan"),
        (adv.RunningNormalization, {**SEEN, "mean": 1.9}, "mean: is 1.9, not between"),
        (adv.RunningNormalization, {**SEEN, "mean": 5.1}, "mean: is 5.1, not between"),
        (adv.RunningNormalization, {**SEEN, "squares": -1.0}, "squares: got -1"),
        (adv.RunningNormalization, {**SEEN, "squares": float("inf")}, "squares: got inf"),
        (adv.RunningNormalization, {**SEEN, "lowest": float("-inf")}, "lowest: got -inf"),
        (adv.RunningNormalization, {**SEEN, "highest": float("inf")}, "highest: got inf"),
        (adv.RunningNormalization, {**SEEN, "lowest": 5.0, "highest": 2.0}, "mean"),
    ],
)
def test_running_states_are_checked(kind: type, state: dict[str, Any], message: str) -> None:
    """A damaged state is refused when it is loaded, not steps later."""
    with pytest.raises(ConfigError, match=rf"^({message})"):
        kind(**state)


def test_running_means_may_be_off_by_rounding() -> None:
    """A mean outside what was seen is refused, unless by less than a billionth of the largest number seen."""
    for lowest, highest, sign in ((0.0, 1e6, 1), (-1e6, 0.0, -1)):
        near, far = (sign * 1e6 * (1.0 + off) for off in (0.9e-9, 1.1e-9))
        assert adv.RunningNormalization(count=3, mean=near, lowest=lowest, highest=highest).mean == near
        with pytest.raises(ConfigError, match="^mean: is"):
            adv.RunningNormalization(count=3, mean=far, lowest=lowest, highest=highest)


def test_running_states_of_one_number_and_of_the_largest() -> None:
    """States at the ends of their ranges are accepted."""
    assert adv.RunningNormalization(count=1, mean=2.0, lowest=2.0, highest=2.0).update([2.0]).tolist() == [0.0]
    assert adv.RunningBaseline(baselines={"": 1e150}).update([1e150]).tolist() == [0.0]


@laws
@given(st.floats(-2, 2), st.floats(-2, 2))
def test_gigpo_divides_both_parts_alike(a: float, b: float) -> None:
    """Two episodes of one step from one state: both parts are the same whitening, whatever ddof is."""
    assume(abs(a - b) > 1e-3)
    for ddof in (0, 1):
        found = np.ravel(adv.gigpo([[a], [b]], [["s"], ["s"]], ddof=ddof, eps=0.0))
        np.testing.assert_allclose(found, 2 * adv.grpo([a, b], ddof=ddof, eps=0.0))


def test_step_wise_grpo() -> None:
    """Every step of a trajectory gets its advantage; several groups give a list of lists."""
    assert adv.step_wise_grpo([1.0, 0.0], [100_000, 1])[0].tolist() == [adv.grpo([1.0, 0.0])[0]] * 100_000
    rewards = [[1.0, 0.0], [0.0, 3.0, 0.5]]
    result = adv.step_wise_grpo(rewards, [[2, 1], [1, 3, 2]], scale="batch")
    assert [[len(a) for a in group] for group in result] == [[2, 1], [1, 3, 2]]
    assert [[a[-1] for a in group] for group in result] == [row.tolist() for row in adv.grpo(rewards, scale="batch")]
