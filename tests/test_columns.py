"""A column [n, 1] is refused wherever [n] is expected: beside a row it broadcasts to [n, n]."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit import DataError, advantages, corrections, credit, metrics, rewards
from rlkit.trajectory import Group, Trajectory, Turn
from tests.golden import load
from tests.properties import examples

torch = pytest.importorskip("torch")

from rlkit.losses import kl, prepare  # noqa: E402
from tests.losses.calls import COMPOSED, NAMES, datums, example  # noqa: E402

few = examples(15)
LOSSES = {**{name: name for name in NAMES}, **COMPOSED}


@attrs.frozen(eq=False)
class Frame:
    """A table of one column, as pandas has them."""

    values: np.ndarray

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


FORMS = {"array": np.asarray, "tensor": torch.tensor, "lists": np.ndarray.tolist, "table": Frame}


def refused(make, *args, said="shape", **options) -> str:
    """Return "" where ``make`` raises a DataError that says so, else what happened."""
    try:
        made = make(*args, **options)
    except DataError as error:
        return "" if said in str(error) else str(error)
    except Exception as error:  # torch's and numpy's own are what must not be
        return f"{type(error).__name__}: {error}"
    return f"accepted: {made!r}"


@few
@given(seed=st.integers(0, 99), n=st.integers(2, 5), k=st.integers(1, 3), form=st.sampled_from(sorted(FORMS)))
def test_losses(seed, n, k, form):
    """Every registered loss and composition: each of its inputs, in the datums of a call, and called directly."""
    failed = []
    for title, function in LOSSES.items():
        prepared = prepare(function)
        driver, inputs = example(function, np.random.default_rng(seed), sizes=(n, n))
        data, leaves = datums(driver, inputs)
        prepared.check(data)
        one = {"datum": lambda x: x[0], "pair": tuple, "batch": list}[prepared.level]
        rows = {name: [torch.tensor(x) for x in values] for name, values in inputs.items()} | {prepared.driver: leaves}
        for name in inputs.keys() - {"target_tokens"}:
            wrong = np.full((n, 4 + k if name == "teacher_logprobs" else k), -1.0 if name.endswith("logprobs") else 1.0)
            direct = {key: one([torch.tensor(wrong)] * 2 if key == name else x) for key, x in rows.items()}
            problems = [refused(prepared.function, **direct)]
            if name != "entropy":  # the model's own
                problems.append(refused(checked, prepared, data, name, FORMS[form](wrong)))
            failed += [f"{title}, {name}: {problem}" for problem in problems if problem]
    for name, estimator in kl.registry.items():
        problem = refused(estimator, -torch.ones(n), -torch.ones(n, k))
        failed += [f"{name}: {problem}"] if problem else []
    assert not failed, "\n".join(failed)


def checked(prepared, data, name, value):
    """Do what every backend does in a call: make the datums, check them, and try the loss out."""
    made = [datum.with_inputs(**{name: value}) for datum in data]
    prepared.check(made)
    prepared.try_out(made)


@few
@given(n=st.integers(2, 6), form=st.sampled_from(sorted(FORMS)))
def test_datums(n, form):
    """What makes datums refuses a column of what is one number per token."""
    column = FORMS[form](np.full((n, 1), -0.5))
    sample = rlkit.Sample([5, 6], range(n), [-1.0] * n)
    datum = sample.datum(1.0)
    played = Trajectory([Turn(sample, reward=1.0)])
    groups = [Group([played, played])]
    calls = {
        "advantage": lambda: sample.datum(column),
        "Sample": lambda: rlkit.Sample([5], range(n), column),
        "supervised": lambda: rlkit.Datum.supervised([5], range(n), column),
        "[T, 1]": lambda: datum.with_inputs(advantages=np.ones((n + 2, 1))),
        "[n, 3]": lambda: datum.with_inputs(advantages=np.ones((n, 3))),
        "[1, n]": lambda: datum.with_inputs(advantages=np.ones((1, n))),
        "datums": lambda: rlkit.trajectory.datums(played, advantages=[column]),
        "assign(rewards)": lambda: credit.assign(groups, rewards=[column, column]),
        "assign(weights)": lambda: credit.assign(groups, weights=[column, column]),
        "token_weights": lambda: advantages.token_weights(FORMS[form](np.full((n, 1), 3))),
    }
    reserved = ("advantages", "weights", "values", "returns", "old_values", "rewards", "entropy")
    reserved += ("sampling_logprobs", "reference_logprobs", "old_logprobs")
    calls |= {name: lambda name=name: datum.with_inputs(**{name: column}) for name in reserved}
    failed = {name: problem for name, call in calls.items() if (problem := refused(call))}
    assert not failed
    with pytest.raises(
        DataError, match=r"advantages.*has shape \(4, 1\); expected \(\), \(4,\) or \(9,\) \(squeeze it"
    ):
        rlkit.Datum(range(9), np.arange(9) > 4, {"advantages": np.ones((4, 1))})


def test_arrays_that_go_together():
    """Every function of several arrays with a reference value: a row and a column are no pair."""
    families = {
        advantages: ("advantages_group", "advantages_time", "advantages_tokens", "token_weights"),
        corrections: ("corrections",),
        metrics: ("metrics",),
        rewards: ("rewards",),
    }
    failed, seen = [], set()
    for module, names in families.items():
        for case in (case for family in names for case in load(family)):
            if case.function not in module.__all__ or case.function == "gdpo":  # rewards [n, components]
                continue
            given = {
                name: x[0] if isinstance(x, list) and isinstance(x[0], list) else x for name, x in case.inputs.items()
            }
            numbers = [name for name, x in given.items() if isinstance(x, list) and len(x) > 1]
            if len(numbers) < 2 or "accepted" not in refused(getattr(module, case.function), **given, **case.settings):
                continue  # it is about several rows, or has one array alone
            seen.add(case.function)
            for name in numbers:
                column = np.array(given[name])[:, None]
                problem = refused(getattr(module, case.function), said="", **{**given, **case.settings, name: column})
                failed += [f"{case.function}({name}): {problem}"] if problem else []
    assert not failed, "\n".join(failed)
    assert len(seen) > 20, sorted(seen)


def test_own_losses():
    """An input is a number or shaped like the driver, beside targets [n, K] maybe [n]; logprobs are exactly so."""

    def own(logprobs, given):
        return (logprobs * given.sum()).sum()

    def own_logprobs(logprobs, given_logprobs):
        return own(logprobs, given_logprobs)

    def of_targets(target_logprobs, given):
        return own(target_logprobs, given)

    def of_targets_logprobs(target_logprobs, given_logprobs):
        return own(target_logprobs, given_logprobs)

    datum = rlkit.Datum([1, 2, 3, 4], [0, 1, 1, 1], {"target_tokens": np.ones((3, 2), int)})
    shapes = [(), (3,), (4,), (3, 1), (4, 1), (3, 2), (4, 2), (3, 3), (4, 4)]
    allowed = {
        own: {(), (3,), (4,)},
        own_logprobs: {(3,), (4,)},
        of_targets: {(), (3,), (4,), (3, 2), (4, 2)},
        of_targets_logprobs: {(3, 2), (4, 2)},
    }
    for function, right in allowed.items():
        name = "given_logprobs" if "logprobs" in function.__name__ else "given"
        for shape in shapes:
            problem = refused(checked, prepare(function), [datum], name, np.full(shape, -1.0))
            assert problem.startswith("accepted") == (shape in right), (function.__name__, shape, problem)
    with pytest.raises(DataError, match=r"data\[0\].inputs\['given'\]: has shape \(4, 1\).*squeeze it"):
        checked(prepare(own), [datum], "given", np.ones((3, 1)))


def test_groups_and_targets_stay():
    """[B, G] rewards, among them groups of one, [n, K] of a teacher, and [n, 1] of its first choice."""
    assert advantages.dr_grpo(np.array([[1.0, 0.0], [1.0, 1.0]])).tolist() == [[0.5, -0.5], [0.0, 0.0]]
    assert advantages.dr_grpo(np.array([[1.0], [0.0]]), singleton="raw").tolist() == [[1.0], [0.0]]
    for k in (1, 3):
        inputs = {"target_tokens": np.ones((3, k), int), "teacher_logprobs": np.full((3, k), -1.0)}
        datum = rlkit.Datum([1, 2, 3, 4], [0, 1, 1, 1], inputs)
        prepared = prepare("topk_forward_kl")
        prepared.check([datum])
        assert prepared.gradient([torch.full((3, k), -1.0)], [datum]).value == 0.0
