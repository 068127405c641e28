"""Laws of estimators that the oracle does not hold, the state of the running ones, flat batches and token weights."""

from __future__ import annotations

import functools
import json
from typing import Any

import attrs
import numpy as np
import pytest

import rlkit.advantages as adv
from rlkit import _rows
from rlkit.errors import ConfigError, DataError, UnknownNameError
from tests.advantages.test_oracle import batch
from tests.each import for_each

pytestmark = pytest.mark.filterwarnings("ignore:rewards. every group has one member")
NAN, INF = float("nan"), float("inf")


@for_each("seed", range(4))
@for_each("name", ["grpo", "dr_grpo", "rloo", "loo_std", "reinforce", "opmd", "asymre", "rec", "maxrl"])
def test_groups_do_not_see_each_other(name: str, seed: int) -> None:
    """Each group of a batch gets what it gets alone, bit for bit."""
    settings = {"opmd": {"baseline": "logavgexp"}, "rec": {"normalize": True}}.get(name, {})
    groups = [*batch(seed), [NAN], [1.5], [NAN, NAN, 2.0]]
    for group, row in zip(groups, adv.registry[name](groups, **settings), strict=True):
        np.testing.assert_array_equal(row, adv.registry[name](group, **settings))


def test_an_offset_changes_no_bit() -> None:
    """Deviations are formed from differences, so an offset that leaves the rewards exact leaves no trace."""
    rewards = np.array([0.0, 1.0, 3.0, 4.0, 4.0, 9.0])
    lengths = {"lengths": [1, 2, 3, 4, 5, 6]}
    cases = [("grpo", {}), ("dr_grpo", {}), ("rloo", {}), ("loo_std", {}), ("rec", {"normalize": True}), ("rebn", {})]
    cases += [("grpo", {"scale": "batch"}), ("reinforce", {"normalize": True}), ("opo", lengths), ("pkpo", {"k": 3})]
    for name, settings in cases:
        estimator = adv.registry[name]
        np.testing.assert_array_equal(estimator(rewards + 2.0**52, **settings), estimator(rewards, **settings), name)


def test_binomials_of_thousands_do_not_overflow() -> None:
    assert np.isfinite(adv.pass_at_k([1.0] * 40 + [0.0] * 3960, method="analytic", k=1000)).all()
    assert np.isfinite(adv.pkpo(np.arange(3000.0), k=500)).all()


def test_rec_balance() -> None:
    """Balance drops the surplus of samples below the mean, by the given generator, and centres on the rest."""
    rewards = [[1.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.5, 0.5]]
    draws = [adv.rec(rewards, drop="balance", rng=np.random.default_rng(seed)) for seed in (*range(40), 3)]
    assert sorted(draws[3][0].tolist()) == [-0.5, 0.0, 0.0, 0.0, 0.5]
    np.testing.assert_allclose(draws[3][1], [1 / 3, 1 / 3, -2 / 3])
    np.testing.assert_array_equal(draws[3][2], [0.0, 0.0])
    np.testing.assert_array_equal(*[np.concatenate(draws[i], axis=None) for i in (3, -1)])
    assert {tuple(np.flatnonzero(draw[0] < 0)) for draw in draws} == {(1,), (2,), (3,), (4,)}
    equal = adv.rec([0.0, 1.0, 0.5, 0.5, 0.5], drop="balance", rng=np.random.default_rng(0))
    assert equal.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0]  # a reward equal to the mean does not lie below it


@for_each("name", ["grpo", "dr_grpo", "rloo", "loo_std", "gpg", "opmd", "asymre", "rec", "maxrl", "pkpo"])
def test_singleton(name: str) -> None:
    """A group of one scored reward gets 0, its reward, or an error, as asked; a group of none gets 0."""
    settings: dict[str, Any] = {"k": 1, "baseline": "none"} if name == "pkpo" else {}
    rewards, function = [[2.0], [NAN, 3.0], [NAN], [1.0, 0.0]], adv.registry[name]
    assert [row.tolist() for row in function(rewards, **settings)[:3]] == [[0.0], [0.0, 0.0], [0.0]]
    raw = function(rewards, singleton="raw", **settings)
    assert [row.tolist() for row in raw[:3]] == [[2.0], [0.0, 3.0], [0.0]]
    with pytest.raises(ValueError, match=r"^rewards\[0\]"):
        function(rewards, singleton="error", **settings)
    assert np.isfinite(function([[NAN, NAN], [1.0, 0.0]], singleton="error", **settings)).all()


@for_each("seed", range(20))
def test_gdpo_components_weigh_alike(seed: int) -> None:
    """The scale and the offset of a component do not matter with eps=0, only the ratio of weights, however small."""
    rng = np.random.default_rng(seed)
    one, two = np.where(rng.random((2, 6, 4)) < 0.1, NAN, rng.normal(size=(2, 6, 4)))
    before = adv.gdpo([one, two], weights=[1.0, 0.5], eps=0.0)
    np.testing.assert_array_equal(adv.gdpo(np.array([one, two]), weights=[1.0, 0.5], eps=0.0), before)
    moved = two * rng.uniform(0.1, 10) + rng.uniform(-5, 5)
    np.testing.assert_allclose(adv.gdpo([one, moved], weights=[1.0, 0.5], eps=0.0), before, atol=1e-6)
    by = 10.0 ** rng.uniform(-30, 30)
    np.testing.assert_allclose(adv.gdpo([one, two], weights=[by, 0.5 * by], eps=0.0), before, atol=1e-6)


def test_hierarchical_grpo_keeps_roles_and_groups_apart() -> None:
    """Each pair of role and group has its own mean, with more roles than groups and with more groups than roles."""
    for roles, groups in ((3, 2), (2, 3), (5, 1), (1, 4)):
        role, group = np.tile(np.indices((roles, groups)).reshape(2, -1), 2)
        rewards = np.arange(role.size) ** 2.0
        half = (rewards[role.size // 2 :] - rewards[: role.size // 2]) / 2
        np.testing.assert_array_equal(adv.hierarchical_grpo(rewards, role, group), np.concatenate([-half, half]))
    assert adv.hierarchical_grpo([1.0, NAN, 0.0], ["a"] * 3, [1, 1, 1]).tolist() == [0.5, 0.0, -0.5]


def test_gigpo() -> None:
    """A state met once and a single episode add nothing; two one-step episodes from one state count twice."""
    np.testing.assert_array_equal(adv.gigpo([[1.0, 2.0]], [["a", "b"]]), [[0.0, 0.0]])
    for ddof in (0, 1):
        found = np.ravel(adv.gigpo([[1.3], [-0.4]], [["s"], ["s"]], ddof=ddof, eps=0.0))
        np.testing.assert_allclose(found, 2 * adv.grpo([1.3, -0.4], ddof=ddof, eps=0.0))


def test_step_wise_grpo() -> None:
    """Every step of a trajectory gets its advantage; several groups give a list of lists."""
    rewards, steps = [[1.0, 0.0], [0.0, 3.0, 0.5]], [[2, 1], [1, 3, 2]]
    for group, row, n in zip(adv.step_wise_grpo(rewards, steps), adv.grpo(rewards), steps, strict=True):
        assert [a.tolist() for a in group] == [[x] * k for x, k in zip(row, n, strict=True)]


def test_running_baseline() -> None:
    """A batch is scored against the baseline as it was before; unscored rewards move nothing; the state is copied."""
    state = {"a": 2.0}
    assert adv.RunningBaseline(decay=0.5, baselines=state).update([NAN, 3.0], ["a", "a"]).tolist() == [0.0, 1.0]
    assert state == {"a": 2.0}
    baseline = adv.RunningBaseline(decay=0.5)
    assert baseline.update([2.0, 4.0, NAN], ["a", "a", "b"]).tolist() == [2.0, 4.0, 0.0]
    assert baseline.baselines == {"a": 2.5}
    assert adv.RunningBaseline(baselines={"": 1e150}).update([1e150]).tolist() == [0.0]
    with pytest.raises(ValueError, match="^roles"):
        baseline.update([1.0, 2.0], ["a"])
    with pytest.raises(ValueError, match="^rewards"):
        baseline.update([[1.0, 2.0]], ["a"])


@for_each("seed", range(10))
def test_running_normalization(seed: int) -> None:
    """After each call mean and deviation are those of all rewards so far."""
    running, seen = adv.running_normalization(eps=1e-3), []
    for part in [[NAN], [3.0], *batch(seed)]:
        seen += [r for r in part if not np.isnan(r)]
        result, expected = running.update(part), np.zeros(len(part))
        if len(seen) > 1 and max(seen) > min(seen):
            expected = np.nan_to_num((np.array(part) - np.mean(seen)) / (np.std(seen, ddof=1) + 1e-3))
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@for_each("scale", [1e-3, 1.0, 1e6])
def test_running_states_go_through_json(scale: float) -> None:
    """A copy made from the saved fields is accepted, and goes on exactly as the original does."""
    for running in (adv.running_normalization(), adv.running_baseline(decay=0.9)):
        for part in np.random.default_rng(0).normal(scale=scale, size=(20, 3)):
            running.update(part)
            again = type(running)(**json.loads(json.dumps(attrs.asdict(running))))
            assert again == running
            np.testing.assert_array_equal(again.update([1.0, 3.0]), attrs.evolve(running).update([1.0, 3.0]))


SEEN = {"count": 3, "mean": 4.0, "squares": 6.0, "lowest": 2.0, "highest": 5.0}
NOTHING = ({**SEEN, "count": 0}, {"mean": 1.0}, {"squares": 1.0}, {"lowest": 1.0, "highest": 1.0})
DAMAGED = {"count": (1.5, -1), "mean": (None, NAN), "squares": (-1.0, INF), "lowest": (-INF,), "highest": (INF,)}
STATES = [({"ddof": 2}, "ddof"), ({"eps": -1.0}, "eps"), ({**SEEN, "lowest": 5.0, "highest": 2.0}, "mean")]
STATES += [(state, "count: is 0") for state in NOTHING]
STATES += [({**SEEN, key: bad}, f"{key}: got {bad}") for key, values in DAMAGED.items() for bad in values]
STATES += [({**SEEN, "mean": bad}, f"mean: is {bad}, not between") for bad in (1.9, 5.1)]
BASELINES = [(None, ": got"), ([1.0], ": got"), ({"a": "1"}, r"\['a'\]: got '1'"), ({"a": NAN}, r"\['a'\]: got nan")]
BASELINES += [({"a": 0.0, 3: 1e151}, r"\[3\]: got 1e\+151")]


@for_each(("kind", "state", "message"), [
    *[(adv.RunningNormalization, state, message) for state, message in STATES],
    *[(adv.RunningBaseline, {"baselines": bad}, f"baselines{message}") for bad, message in BASELINES],
])  # fmt: skip
def test_damaged_states_are_refused(kind: type, state: dict[str, Any], message: str) -> None:
    """A damaged state is an error when it is loaded, not steps later."""
    with pytest.raises(ConfigError, match=rf"^({message})"):
        kind(**state)


def test_running_means_may_be_off_by_rounding() -> None:
    """A mean outside what was seen is refused, unless by less than a billionth of the largest number seen."""
    for lowest, highest, sign in ((0.0, 1e6, 1), (-1e6, 0.0, -1)):
        near, far = (sign * 1e6 * (1.0 + off) for off in (0.9e-9, 1.1e-9))
        assert adv.RunningNormalization(count=3, mean=near, lowest=lowest, highest=highest).mean == near
        with pytest.raises(ConfigError, match="^mean: is"):
            adv.RunningNormalization(count=3, mean=far, lowest=lowest, highest=highest)


@for_each("name", ["grpo", "rloo", "loo_std", "maxrl"])
@for_each("seed", range(5))
def test_by_group_is_the_estimator_of_each_label(name: str, seed: int) -> None:
    """Each label's rewards get what the estimator gives them as a group, wherever they are; labels may be anything."""
    rng = np.random.default_rng(seed)
    rewards = np.where(rng.random(20) < 0.1, NAN, rng.normal(size=20))
    labels = [["a", 3, ("x", 1), 2.5, "3"][i] for i in rng.integers(5, size=20)]
    result = adv.by_group(name, rewards, labels)
    for label in set(labels):
        places = [i for i, other in enumerate(labels) if other == label]
        np.testing.assert_array_equal(result[places], adv.registry[name](rewards[places]))


@for_each("dtype", ["int8", "int16", "uint8", "int64", "uint64"])
@for_each("shift", [0, -100, 2**62, 2**63])
@for_each(("factor", "order"), [(1, list), (1000, list), (1, sorted)])
def test_integer_labels(dtype: str, shift: int, factor: int, order: Any) -> None:
    """Arrays of integers are coded without a loop, and as other labels are: by order of appearance."""
    numbers, info = np.random.default_rng(0).integers(0, 120, size=30).tolist(), np.iinfo(dtype)
    labels = order([min(max(n * factor + shift, int(info.min)), int(info.max)) for n in numbers])
    codes = _rows.read_labels("groups", np.array(labels, dtype), len(labels))
    assert codes.tolist() == _rows.read_labels("groups", labels, len(labels)).tolist()


def test_by_group_settings() -> None:
    """Settings are passed on and lengths are regrouped; a group may be a sequence in time; arrays are labels, too."""
    rewards, labels = [1.0, 5.0, 0.0, 3.0], np.array([7, 8, 7, 8])
    assert adv.by_group("grpo", rewards, labels, scale="none").tolist() == [0.5, 1.0, -0.5, -1.0]
    found = adv.by_group("opo", rewards, labels, lengths=[1, 2, 3, 4])
    np.testing.assert_allclose(found, [0.75, 4 / 3, -0.25, -2 / 3])
    rewards, labels = [0.0, 0.0, 1.0, 0.0, 2.0], [4, 9, 4, 4, 9]
    assert adv.by_group("discounted_returns", rewards, labels, gamma=0.5).tolist() == [0.5, 1.0, 1.0, 0.0, 2.0]


def test_by_group_takes_any_callable() -> None:
    """An estimator is any function of a list of groups; what it returns is checked."""
    for function, settings, expected in (
        (lambda groups: [g - g.max() for g in groups], {}, [-4.0, 0.0, 0.0]),
        (lambda groups, **kw: [g * kw["by"] for g in groups], {"by": 2.0}, [2.0, 4.0, 10.0]),
        (lambda groups, by: [g * by for g in groups], {"by": 3.0}, [3.0, 6.0, 15.0]),
        (functools.partial(adv.grpo, scale="none"), {}, [-2.0, 0.0, 2.0]),
        (lambda *groups: groups[0], {}, [1.0, 2.0, 5.0]),
        (list, {}, [1.0, 2.0, 5.0]),  # some versions of Python read no signature of it
    ):
        assert adv.by_group(function, [1.0, 2.0, 5.0], ["a", "b", "a"], **settings).tolist() == expected
    with pytest.raises(DataError, match="expected 2 rows"):
        adv.by_group(lambda groups: groups[:1], [1.0, 2.0, 5.0], ["a", "b", "a"])
    with pytest.raises(UnknownNameError, match="did you mean 'grpo'"):
        adv.by_group("grpoo", [1.0], ["a"])
    with pytest.raises(ConfigError):
        adv.by_group(3, [1.0], ["a"])  # type: ignore[arg-type]


def test_per_group() -> None:
    """A function of one group becomes an estimator, with its settings; what it returns is checked."""
    centred = adv.per_group(lambda group, *, by=1.0: (group - group.mean()) * by)
    found = centred([[1.0, 3.0], [2.0], [0.0, 1.0, 5.0]], by=2.0)
    assert [row.tolist() for row in found] == [[-2.0, 2.0], [0.0], [-4.0, -2.0, 6.0]]
    shares = adv.per_group(lambda group, *, lengths: group / lengths)
    assert [row.tolist() for row in shares([[1.0], [2.0, 3.0]], lengths=[[2], [1, 6]])] == [[0.5], [2.0, 0.5]]
    with pytest.raises(DataError, match=r"rewards\[1\]\): returned an array of shape \(1,\); expected \(2,\)"):
        adv.per_group(lambda group: group[:1])([[1.0], [2.0, 3.0]])
    assert adv.per_group(lambda group: group - 1.0)([NAN, 3.0]).tolist() == [0.0, 2.0]
    for wrong in (adv.per_group(lambda group: group - group.mean()), lambda groups: [g * NAN for g in groups]):
        with pytest.raises(DataError, match="is nan; expected a finite advantage"):
            adv.by_group(wrong, [1.0, NAN, 3.0], ["a", "a", "a"])


def test_token_weights_count_sequences_and_prompts_that_have_tokens() -> None:
    for labels in ("abb", "abc"):
        assert adv.token_weights([0, 2, 2], "prompt-mean", groups=list(labels)).tolist() == [0.0, 0.25, 0.25]
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
        assert adv.token_weights([0, 0], mode).tolist() == [0.0, 0.0]
