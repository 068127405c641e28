"""Arrays: another shape is refused by name, tensors are as good as arrays, and settings are kept as plain numbers."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

import rlkit
from rlkit import advantages, corrections, credit, evaluation, filters, metrics, rewards
from rlkit.envs import TaskSettings
from rlkit.errors import DataError, RlkitError
from rlkit.futures import Future
from rlkit.gateway import Limits
from rlkit.rollouts import Plan
from rlkit.runs import Retention
from rlkit.trajectory import Group, Trajectory, Turn, datums
from tests.each import for_each

torch = pytest.importorskip("torch")

from rlkit.losses import kl, prepare, with_entropy, with_kl  # noqa: E402
from tests.losses import calls  # noqa: E402

R = np.array([1.0, 0.5, 2.0])
BY_KIND = {  # a row of three that all parameters of these names take
    "rewards values kl entropy advantages potentials returns importance": R,
    "trainer_logprobs sampling_logprobs reference_logprobs teacher_logprobs logprobs sum_p2_logp": -R,
    "sum_p2 log_ratios": R / 4, "mask finished truncated correct": [True, False, True],
    "lengths steps versions n c": [3, 1, 2], "groups roles states": ["a", "b", "a"],
    "sequences tokens": [[1], [2, 3], [1]], "texts": ["a", "b", "c"], "failures": [None, True, False],
    "stop_reasons": ["stop", "length", "stop"],
}  # fmt: skip
ARRAYS = {name: row for names, row in BY_KIND.items() for name in names.split()}
PER_ROW = ("lam", "bootstrap_value", "baseline")  # a number, or one for each row
SETTINGS = {"k": 2, "max_length": 5, "threshold": 0.5, "current": 6, "max_lag": 2, "buffer": 2, "n": 2}
SPECIAL = {  # functions whose arguments go together in another way, and those that take none
    "advantages.by_group": {"estimator": "grpo", "rewards": R, "groups": ["a", "b", "a"]},
    "rewards.clamp": {"rewards": R, "low": 0.0}, "filters.dynamic_sampling": {"rewards": R},
    "advantages.gdpo": {"rewards": [R, R]}, "metrics.pass_at_k": {"n": [4, 4, 4], "c": [1, 2, 0], "k": 2},
    "rewards.mapping": {"rewards": R, "table": {1.0: 0.0, 0.5: 1.0, 2.0: 2.0}},
    "rewards.nonterminal_reward": {"rewards": [R, R, R], "finished": [True, False, True]},
    "advantages.token_weights": {"lengths": [3, 1, 2], "mode": "prompt-mean", "groups": ["a", "b", "a"]},
}  # fmt: skip
FUNCTIONS = {
    f"{module.__name__.removeprefix('rlkit.')}.{name}": getattr(module, name)
    for module in (advantages, corrections, filters, metrics, rewards)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) and name != "per_group"
}
GROUPED = {  # one array that may have any number of rows: there a column is a matrix
    "asymre", "dr_grpo", "gpg", "grpo", "loo_std", "maxrl", "opmd", "pass_at_k", "pkpo", "rec", "reinforce", "rloo",
    "difficulty_band", "dynamic_sampling", "zero_variance", "group_informativeness", "clamp", "whitening", "affine",
    "entropy_estimate", "token_lag", "top_entropy", "length_cost", "overlong_penalty", "reduction", "mapping", "gdpo",
}  # fmt: skip
LISTS = {"sequences", "tokens", "texts", "failures", "stop_reasons"}  # of anything, one entry per sample


@attrs.frozen(eq=False)
class Frame:
    """A table of one column, as pandas has them."""

    values: np.ndarray

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


COLUMNS = ("a column", "a column of lists", "a column of a table", "a column of a tensor")


def wrong(value, *, alone=False):
    """Return arrays of another rank or size, and what is none, by name; of one that stands ``alone`` any size is right.

    A column [n, 1] where [n] is expected would broadcast to [n, n] beside a row.
    """
    array = np.asarray(value, object if isinstance(value[0], (list, str)) or value[0] is None else None)
    found = {"a cube": array[None, None], "text": "abc", "an object": object(), "a mapping": {"a": 1.0}}
    found |= {"nothing": None, "no dimension": np.array(1.0)}
    if not alone:
        columns = array[:, None], array[:, None].tolist(), Frame(array[:, None]), torch.ones(len(array), 1)
        found |= dict(zip(COLUMNS, columns, strict=True))
        found |= {"too long": np.concatenate([array, array]), "a square": np.stack([array] * len(array))}
    return found


def outcome(function, given, names):
    """Return "" where the call raises an error of rlkit's that names one of the arguments, else what happened."""
    try:
        made = function(**given)
    except RlkitError as error:
        return "" if any(name in str(error) for name in names) else f"does not name it: {error}"
    except Exception as error:  # torch's and numpy's own are what must not be
        return f"{type(error).__name__}: {error}"
    return f"accepted: {made!r}"


def right(title, function):
    """Return arguments that the function takes: every array that it names, and the settings that it needs."""
    if title in SPECIAL:
        return SPECIAL[title]
    given = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in SETTINGS and parameter.default is parameter.empty:
            given[parameter.name] = SETTINGS[parameter.name]
        elif parameter.name in PER_ROW and parameter.annotation != "str":
            given[parameter.name] = [0.5]
        elif parameter.name in ARRAYS and parameter.annotation != "int":
            given[parameter.name] = ARRAYS[parameter.name]
        else:
            assert parameter.default is not parameter.empty, f"{title}({parameter.name}): add it to ARRAYS or SETTINGS"
    return given


def test_functions_over_arrays():
    """Every public function, each of its arrays: another rank or size is an error of ours that names the argument."""
    failed, count = [], 0
    for title, function in FUNCTIONS.items():
        given, parameters = right(title, function), inspect.signature(function).parameters
        name = title.partition(".")[2]
        assert outcome(function, given, ()).startswith("accepted"), (title, outcome(function, given, ()))
        arrays = [key for key in given if key in (*ARRAYS, *PER_ROW) and not isinstance(given[key], int)]
        for key in arrays:
            alone = (
                (len(arrays) == 1 and name in GROUPED)
                or key in LISTS
                or (name, key) == ("nonterminal_reward", "rewards")
            )
            allowed = {"a cube"} if key in LISTS else {"no dimension"} if key in PER_ROW else set()
            allowed |= {"too long"} if len(arrays) == 1 else set()
            allowed |= {"nothing"} if parameters[key].default is None else set()
            for what, value in wrong(given[key], alone=alone).items():
                if what not in allowed:
                    names = arrays if what == "too long" or name == "gigpo" else [key]  # the two disagree
                    problem = outcome(function, {**given, key: value}, names)
                    count += 1
                    failed += [f"{title}({key}), {what}: {problem}"] if problem else []
    assert not failed, "\n".join(failed)
    assert count > 800


def sample(prompt, tokens):
    return rlkit.Sample(prompt, tokens, [-1.0] * len(tokens))


ONE = Trajectory([Turn(sample([5, 6], [7, 8, 9]), reward=1.0)])
TWO = Trajectory([Turn(sample([5, 6], [9, 4])), Turn(sample([5, 6, 9, 4, 1], [3]), reward=0.5)])
LEVELS = ("group", "turn", "token")
GROUPS = [Group([ONE, TWO]), Group([TWO, ONE])]
DATUM = rlkit.Datum([1, 2, 3, 4], [0, 1, 1, 1])
INPUTS = ("advantages", "weights", "values", "returns", "old_values", "rewards", "entropy", "sampling_logprobs")
INPUTS += ("reference_logprobs", "old_logprobs", "versions")


def gae(give, trajectories, **options):
    critic = SimpleNamespace(values=lambda data: Future.of(give([np.zeros(len(datum)) for datum in data])))
    return credit.assign([Group(trajectories)], "gae", level="token", critic=critic, **options)


OF_THREE = [  # what is called with a row of three; what an error names, and which other rows are right
    ("Sample.prompt", lambda x: rlkit.Sample(x, [1, 2, 3], [-1.0] * 3), ("too long",)),
    ("Sample.tokens", lambda x: rlkit.Sample([1], x, [-1.0] * 3), ()),
    ("Sample.logprobs", lambda x: rlkit.Sample([1], [1, 2, 3], np.negative(x) if isinstance(x, np.ndarray) else x), ()),
    ("Sample.versions", lambda x: rlkit.Sample([1], [1, 2, 3], [-1.0] * 3, versions=x), ("nothing",)),
    ("Datum.tokens", lambda x: rlkit.Datum(x, [0, 1, 1]), ()),
    ("Datum.mask", lambda x: rlkit.Datum([1, 2, 3], np.not_equal(x, 1) if isinstance(x, np.ndarray) else x), ()),
    ("completion", lambda x: rlkit.Datum.supervised([1], x), ("too long",)),
    ("inputs['weights']", lambda x: rlkit.Datum.supervised([1], [1, 2, 3], x), ("no dimension",)),
    ("advantage", sample([5], [1, 2, 3]).datum, ("nothing", "no dimension")),
    *[(f"inputs['{x}']", lambda row, x=x: DATUM.with_inputs(**{x: row}), ("no dimension",)) for x in INPUTS],
    ("select", DATUM.select, (*COLUMNS, "a square")),  # [n, K], too
    ("expand", DATUM.expand, (*COLUMNS, "a square")),
    ("per_turn", ONE.per_turn, (*COLUMNS, "a square")),
    ("keep", lambda x: filters.Selection(x, {}), ()),
    ("rewards", advantages.RunningBaseline().update, ("too long",)),
    ("roles", lambda x: advantages.RunningBaseline().update([1.0, 2.0, 3.0], x), ("nothing",)),
    ("groups", credit.assign, ()),
    ("Trajectory.turns", Trajectory, ()),
]
OF_FOUR = [  # one number per trajectory
    ("rewards", lambda x: Group.of_samples([ONE.turns[0].sample] * 4, x), ()),
    ("rewards", lambda x: credit.assign(GROUPS, rewards=x), ("nothing",)),
    ("rewards", lambda x: gae(list, [ONE] * 4, rewards=x), ("nothing",)),
    ("rewards", lambda x: Turn(ONE.turns[0].sample, rewards=x), ("too long", "nothing")),
    ("weights", lambda x: credit.assign(GROUPS, weights=x), ("nothing",)),
    ("baseline", lambda x: credit.assign(GROUPS, "remax", level="token", baseline=x), ("nothing",)),
    ("seed", lambda x: list(credit.minibatches([credit.Item([DATUM])] * 4, 2, seed=x)), ("too long",)),
]
INSTEAD = {"Datum.tokens": "Datum.mask", "Sample.tokens": "Sample.logprobs"}  # what is named where one is too long


def test_data():
    """Samples, datums and their inputs, selections, running statistics, and what is given per trajectory."""
    failed = []
    for table, row in ((OF_THREE, [1, 2, 3]), (OF_FOUR, [1.0, 2.0, 3.0, 4.0])):
        for name, call, right in table:
            for what, x in {**wrong(row), "a row of a matrix": np.array([row])}.items():
                named = INSTEAD.get(name, name) if what == "too long" else name
                problem = "" if what in right else outcome(lambda x=x, call=call: call(x), {}, [named])
                failed += [f"{name}, {what}: {problem}"] if problem else []
    assert not failed, "\n".join(failed)
    with pytest.raises(DataError, match=r"advantages.*\(4, 1\); expected \(\), \(4,\) or \(9,\) \(squeeze it"):
        rlkit.Datum(range(9), np.arange(9) > 4, {"advantages": np.ones((4, 1))})


def test_numbers_of_tokens():
    """What is given for each token, and what an estimator or a critic gives: arrays or lists of numbers."""
    cases = []
    for x in (np.ones((3, 1)), np.ones(2), torch.ones(3, 1), np.ones((3, 3))):
        cases += [(key, lambda x=x, key=key: credit.assign(GROUPS, **{key: [x] * 4})) for key in ("rewards", "weights")]
        cases += [(key, lambda x=x, key=key: datums(ONE, **{key: [x]})) for key in ("advantages", "weights")]
    for form in (
        lambda rows: [np.asarray(row)[:, None] for row in rows],
        lambda rows: rows[:-1],
        lambda rows: [np.sum(row) for row in rows],
        lambda rows: ["abc" for _ in rows],
        lambda _: None,
        np.concatenate,
    ):
        cases.append(("critic.values", lambda form=form: gae(form, [ONE, TWO])))
        for level in LEVELS:
            own = lambda rewards, form=form: form(rewards)  # noqa: E731
            cases.append(("estimator", lambda own=own, level=level: credit.assign(GROUPS, own, level=level)))
    failed = [f"{name}: {problem}" for name, call in cases if (problem := outcome(call, {}, [name]))]
    assert not failed, "\n".join(failed)
    for level in LEVELS:
        batch = credit.assign(GROUPS, lambda rewards: [list(row) for row in rewards], level=level)
        assert [x.size for x in batch.advantages] == [3, 3, 3, 3], level
        assert batch.advantages[0][-1] == 1.0, level


def checked(prepared, data, name, value):
    """Do what every backend does in a call: make the datums, check them, and try the loss out."""
    made = [datum.with_inputs(**{name: value}) for datum in data]
    prepared.check(made)
    prepared.try_out(made)


@for_each("form", (np.asarray, torch.tensor, np.ndarray.tolist, Frame))
@for_each(("n", "k"), ((2, 1), (3, 1), (3, 3), (5, 2)))
def test_losses(n, k, form):
    """Every registered loss and composition: each of its inputs, in the datums of a call, and called directly."""
    failed = []
    for title, function in calls.ALL.items():
        prepared = prepare(function)
        driver, inputs = calls.example(function, np.random.default_rng(n), sizes=(n, n))
        data, leaves = calls.datums(driver, inputs)
        prepared.check(data)
        one = calls.SHAPES[prepared.level]
        rows = {name: [torch.tensor(x) for x in values] for name, values in inputs.items()} | {prepared.driver: leaves}
        for name in inputs.keys() - {"target_tokens"}:
            wide = np.full((n, 4 + k if name == "teacher_logprobs" else k), -1.0 if name.endswith("logprobs") else 1.0)
            direct = {key: one([torch.tensor(wide)] * 2 if key == name else x) for key, x in rows.items()}
            problems = [outcome(prepared.function, direct, ["shape"])]
            if name != "entropy":  # the model's own
                given = {"prepared": prepared, "data": data, "name": name, "value": form(wide)}
                problems.append(outcome(checked, given, ["shape"]))
            failed += [f"{title}, {name}: {problem}" for problem in problems if problem]
    for name, estimator in kl.registry.items():
        pair = {"logprobs": -torch.ones(n), "reference_logprobs": -torch.ones(n, k)}
        problem = outcome(lambda **pair: estimator(*pair.values()), pair, ["shape"])  # noqa: B023
        failed += [f"{name}: {problem}"] if problem else []
    assert not failed, "\n".join(failed)


def test_losses_of_ones_own():
    """An input is a number or shaped like the driver, beside targets [n, K] maybe [n]; logprobs are exactly so."""
    datum = DATUM.with_inputs(target_tokens=np.ones((3, 2), int))
    own = lambda logprobs, x: (logprobs * x.sum()).sum()  # noqa: E731
    for name, function, shapes in (
        ("x", own, {(), (3,), (4,)}),
        ("x_logprobs", lambda logprobs, x_logprobs: own(logprobs, x_logprobs), {(3,), (4,)}),
        ("x", lambda target_logprobs, x: own(target_logprobs, x), {(), (3,), (4,), (3, 2), (4, 2)}),
        ("x_logprobs", lambda target_logprobs, x_logprobs: own(target_logprobs, x_logprobs), {(3, 2), (4, 2)}),
    ):
        for shape in [(), (3,), (4,), (3, 1), (4, 1), (3, 2), (4, 2), (3, 3), (4, 4)]:
            given = {"prepared": prepare(function), "data": [datum], "name": name, "value": np.full(shape, -1.0)}
            problem = outcome(checked, given, ["shape"])
            assert problem.startswith("accepted") == (shape in shapes), (shapes, shape, problem)
    with pytest.raises(DataError, match=r"data\[0\].inputs\['x'\]: has shape \(4, 1\).*squeeze it"):
        checked(prepare(own), [datum], "x", np.ones((3, 1)))


def test_ids_are_integers_and_logprobs_at_most_0():
    """Refused where they are given: a worker could only fail at them later. 0.1 is for the rounding of bfloat16."""
    for name, value in {"target_tokens": np.ones((3, 2)), "versions": [1.0, 1.0, 2.0]}.items():
        with pytest.raises(DataError, match=rf"inputs\['{name}'\]: has dtype float64; expected integers"):
            DATUM.with_inputs(**{name: value})
        assert DATUM.with_inputs(**{name: np.asarray(value, np.int32)}).inputs[name].dtype == np.int64
    with pytest.raises(DataError, match=r"versions\[1\]: is 3.5; expected an integer"):
        filters.stale([3, 3.5], current=6, max_lag=1)
    for name in ("sampling_logprobs", "reference_logprobs", "old_logprobs", "teacher_logprobs", "my_logprobs"):
        assert DATUM.with_inputs(**{name: [-1.0, 0.09, 0.0]}).inputs[name].dtype == np.float32
        with pytest.raises(DataError, match=rf"inputs\['{name}'\]\[2\]: is 0.5; expected a logprob"):
            DATUM.with_inputs(**{name: [-1.0, 0.5, 0.0]})
    with pytest.raises(DataError, match=r"teacher_logprobs'\]\[1\]\[1\]: is 0.5"):
        DATUM.with_inputs(teacher_logprobs=[[-1.0, 0.5]] * 3)


LP = [-1.0, -1.0, -1.0]
OF_MIX = {"sampling_logprobs": LP, "advantages": 1.0, "expert": 0, "mu": 0.5, "reference_logprobs": LP}
COMPOSED, OF_COMPOSED = with_entropy(with_kl("mix", "kl_now"), "entropy_now"), {"kl_now": 0.5, "entropy_now": -0.5}


@for_each(
    ("loss", "name", "allowed", "refused"),
    [
        ("mix", "mu", (0.0, 1, [0.0, 0.5, 1.0]), (2.0, -0.1, [0.5, 1.5, 0.5])),
        ("mix", "expert", (0, 1.0, [0, 1, 1]), (0.5, 2, -1, [0, 2, 0])),
        (COMPOSED, "mu", (), (2.0,)),
        (COMPOSED, "expert", (), (0.5,)),
        (COMPOSED, "kl_now", (0, 5.0, [0.0, 1.0, 2.0]), (-0.1, [0.1, -0.1, 0.1])),
        (COMPOSED, "entropy_now", (-1.0, 1.0), ()),
        ("kto", "desirable", (0, 1, 0.0, 1.0), (7, 0.5, -1, [1, 0, 1])),
    ],
)
def test_settings_given_as_inputs(loss, name, allowed, refused):
    """A mixing weight, a label and a coefficient are in their ranges, also where the loss is part of another."""
    for value in (*allowed, *refused):
        data = [DATUM.with_inputs(**{**OF_MIX, **OF_COMPOSED, name: value})]
        problem = outcome(prepare(loss).check, {"data": data}, [f"data[0].inputs['{name}']"])
        assert problem == ("accepted: None" if value in allowed else ""), (value, problem)


NUMBERS = (np.float32, np.float64, torch.tensor, np.array, lambda x: torch.tensor(x, dtype=torch.bfloat16))
MAKERS = {bool: (np.bool_, torch.tensor, np.array), int: (np.int64, np.uint8, torch.tensor, np.array), float: NUMBERS}
FIELDS = {  # a class, the fields without a default number, and what else it needs
    rlkit.Adam: {}, rlkit.SamplingParams: {"top_k": 5}, rlkit.Lora: {"seed": 3, "train_unembed": True},
    TaskSettings: {"n": 2, "min_n": 1, "max_tokens": 3, "max_turns": 2, "temperature": 0.5, "deadline": 8.0},
    Limits: {"turns": 2, "tokens": 3, "seconds": 0.5, "at_once": 1}, Retention: {"every": 5, "metric": None},
    Plan: {"min_n": 2, "max_total_tokens": 9, "max_length": 64, "call_timeout": 0.5, "progress": False},
    Trajectory: {"index": 1, "seed": 2, "nonterminal_reward": 0.5, "turns": []},
    rlkit.Sample: {"prompt": [1], "tokens": [2], "logprobs": [-1.0]},
}  # fmt: skip


def test_fields_are_plain_numbers():
    """A number of numpy's, or of torch's without dimensions, becomes Python's own: it cannot change, and is JSON."""
    count = 0
    for kind, more in FIELDS.items():
        values = {f.name: f.default for f in attrs.fields(kind)} | more
        for name, value in ((name, value) for name, value in values.items() if isinstance(value, (bool, int, float))):
            others = {key: x for key, x in more.items() if key != name}
            for make in MAKERS[type(value)]:
                if make is np.uint8 and value < 0:
                    continue
                kept = getattr(kind(**others, **{name: make(value)}), name)
                assert type(kept) is type(value), (kind, name, make)
                assert kept == pytest.approx(value, rel=1e-2), (kind, name, make)
                count += 1
            for bad in (np.array([value]), torch.tensor([value, value]), np.array([[value]]), "1"):
                problem = outcome(kind, {**others, name: bad}, [f"{kind.__name__}.{name}"])
                assert not problem, (kind, name, bad, problem)
    assert count > 100
    assert rlkit.SamplingParams(stop=[torch.tensor(3), np.int64(4)]).stop == (3, 4)


VALUES = [-0.5, -1.5, -1.0, -0.25]  # exact in every dtype below, and logprobs as well
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
FOUR = sample([65], [66, 67, 68, 69])
USES = {
    "estimators": advantages.grpo,
    "estimators of a list": lambda x: advantages.grpo([x, x])[1],
    "Datum.inputs": lambda x: FOUR.datum(x).inputs["advantages"],
    "weights of a datum": lambda x: FOUR.datum(1.0, weights=x).inputs["weights"],
    "select": lambda x: FOUR.datum(1.0).expand(x),
    "corrections": lambda x: corrections.token_tis(trainer_logprobs=x, sampling_logprobs=-np.ones(4)),
    "filters": lambda x: filters.unscored(x).keep,
    "metrics": lambda x: metrics.kl_k3(trainer_logprobs=x, sampling_logprobs=-np.ones(4)),
    "rewards": lambda x: rewards.clamp(x, low=-1.0, high=1.0),
    "evaluation": lambda x: evaluation.score([x], k=[1]).mean,
    "rewards of tokens": lambda x: gae(list, [Trajectory([Turn(FOUR)])], rewards=[x]).data[0].inputs["advantages"],
}


@for_each("dtype", DTYPES, ids=str)
def test_tensors_are_arrays(dtype):
    """The same numbers as from an array of float64, in every form in which a model may give them; one is a number."""
    tensor = torch.tensor(VALUES).to(dtype)
    forms = [tensor, list(tensor), tensor.repeat_interleave(2)[::2]]
    if dtype.itemsize > 1:
        forms += [tensor.clone().requires_grad_(), list(tensor.clone().requires_grad_())]
    for use in USES.values():
        expected = use(np.array(VALUES))
        for form in forms:
            np.testing.assert_array_equal(use(form), expected)
    score = torch.tensor(0.5).to(dtype)
    assert Turn(FOUR, reward=score).reward == Turn(FOUR, reward=np.array(0.5)).reward == 0.5
    assert float(FOUR.datum(score).inputs["advantages"][1]) == 0.5
    with pytest.raises(DataError, match="a finite number"):
        Turn(FOUR, reward=torch.tensor([0.5]).to(dtype))


def test_groups_of_one_warn_once():
    """A column of rewards is as many groups of one: nothing is compared, and it says so once for each line."""
    column, row, one = np.array([[1.0], [0.0], [2.0]]), np.array([[1.0, 0.0, 2.0]]), [[1.0]]
    compare = ["grpo", "dr_grpo", "rloo", "loo_std", "gpg", "opmd", "asymre", "maxrl", "rec", "pass_at_k"]
    uses = {name: advantages.registry[name] for name in compare} | {
        "opo": lambda r: advantages.opo(r, lengths=np.ones_like(r)), "gdpo": lambda r: advantages.gdpo([r, r]),
        "reinforce_pp_baseline": lambda r: advantages.reinforce_pp_baseline(r, lengths=np.ones_like(r)),
        "step_wise_grpo": lambda r: advantages.step_wise_grpo(r, np.ones_like(r)),
        "by_group": lambda r: advantages.by_group("grpo", np.ravel(r), np.repeat(np.arange(len(r)), len(r[0]))),
        "assign": lambda r: credit.assign([Group([attrs.evolve(ONE)] * len(x)) for x in r]),
        "zero_variance": filters.zero_variance, "dynamic_sampling": filters.dynamic_sampling,
        "group_informativeness": metrics.group_informativeness,
    }  # fmt: skip
    for name, use in uses.items():
        for value, times in ((column, 1), (row, 0), (one, 0)):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("default")
                for _ in range(3):
                    use(value)
            assert len(said) == times, (name, value, said)
            assert all("every group has one member" in str(x.message) and x.filename == __file__ for x in said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert advantages.grpo(column, singleton="raw").tolist() == column.tolist()
        assert advantages.reinforce(column).tolist() == column.tolist()
        assert not advantages.gigpo([[1.0, 0.0]], [["a", "b"]]).any()  # states that occur once
        with pytest.raises(DataError, match="at least two"):
            advantages.grpo(column, singleton="error")
