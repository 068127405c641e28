"""The inputs and settings of estimators: each error names the argument and the place."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import rlkit.advantages as adv
from rlkit._rows import Rows
from rlkit.errors import ConfigError, DataError
from tests.each import for_each

NAN, INF = float("nan"), float("inf")
TWO, THREE, RAGGED, ROW = [1.0, 0.0], [1.0, 2.0, 3.0], [[1.0], [2.0, 3.0]], np.zeros(2)
BAD_ROWS: dict[str, tuple[Any, ...]] = {
    "^rewards: got": (1.0, "1 0", b"10", {"a": 1.0}, np.zeros((2, 2, 2)), np.array(["a"]), np.array([1.0 + 2j])),
    "^rewards": (None, np.array([1.0, None], object)),
    "^rewards: is empty": ([], np.zeros(0), np.zeros((0, 3))),
    "^rewards: holds booleans": (np.array([True, False]),),
    r"^rewards\[0\]: is empty": (np.zeros((3, 0)), [[]]),
    r"^rewards\[0\]: (is|got)": ([1e151, 0.0], [[[1.0], [1.0, 2.0]], [1.0]]),
    r"^rewards\[1\]: is empty": ([[1.0], []],),
    r"^rewards\[1\]: is": ([1.0, None], [1.0, "1"], [1.0, True], [1.0, INF]),
    r"^rewards\[1\]\[1\]: is": ([TWO, [3.0, None]], [THREE, [1.0, -INF]], np.array([TWO, [2.0, INF]], np.float32)),
    r"^rewards\[1\]\[0\]: is False": ([[1.0, 2.0], [False, 1.0]],),
    r"^rewards\[1\]: (got|holds)": ([TWO, 3.0], [TWO, "ab"], [ROW, np.zeros((2, 2))], [ROW, np.array([True])]),
}


@for_each(("message", "rewards"), [(message, bad) for message, values in BAD_ROWS.items() for bad in values])
def test_bad_rows_are_named(message: str, rewards: Any) -> None:
    """Rows are numbers of at most 1e150, and an error names the first entry that is not."""
    with pytest.raises(DataError, match=message):
        Rows.parse("rewards", rewards, nan=True)


@for_each(
    ("rewards", "read", "value", "settings", "message"),
    [
        (THREE, "read_like", [1.0, 2.0], {}, r": has length 2; expected 3 \(as long as rewards\)"),
        (THREE, "read_like", [THREE], {}, r": has shape \(1, 3\)"),
        (THREE, "read_like", None, {}, ": is None"),
        (THREE, "read_like", [1.0, "2", 3.0], {}, r"\[1\]: is '2'"),
        *[(THREE, "read_like", [1, bad, 0], {"boolean": True}, rf"\[1\]: is {bad}") for bad in (2, NAN, None)],
        (THREE, "read_like", ["1", "1", "1"], {"boolean": True}, r"\[0\]"),
        (RAGGED, "read_like", [[1.0], [2.0]], {}, r"\[1\]: has length 1; expected 2"),
        (RAGGED, "read_like", [1, 1, 1], {}, r": has shape \(3,\)"),
        *[(THREE, "read_counts", [1, 1, bad], {}, rf"\[2\]: is {bad}; expected an int") for bad in (1.5, -1.0, NAN)],
        (THREE, "read_counts", [1, 2, 0], {"low": 1}, r"\[2\]: is 0.0; expected an integer >= 1"),
        *[(THREE, "read_each", bad, {}, ": got") for bad in (NAN, None, True, 1.1e150, -1.1e150)],
        (THREE, "read_each", [1.0, 2.0], {}, ": has shape"),
        (THREE, "read_each", RAGGED, {}, ": has 2 rows"),
        (THREE, "read_each", [INF], {}, r"\[0\]"),
    ],
)
def test_bad_companions_of_rows_are_named(
    rewards: Any, read: str, value: Any, settings: dict[str, Any], message: str
) -> None:
    """An argument that accompanies rows has their layout, or is one number for each."""
    with pytest.raises(DataError, match=f"^x{message}"):
        getattr(Rows.parse("rewards", rewards), read)("x", value, **settings)


SAMPLING = {"sampling_logprobs": [-1.0, -2.0]}
TEACHER = {"teacher_logprobs": [-1.0, -2.0], **SAMPLING}
LENGTHS, VALUES, NORM = {"lengths": [1, 2]}, {"values": TWO}, {"mode": "seq-mean-token-sum-norm"}
NEEDS: dict[str, dict[str, Any]] = {  # the required arguments besides two rewards
    "entropy_bonus": SAMPLING, "kl_penalty": {"reference_logprobs": [-1.0, -2.0], **SAMPLING}, "pkpo": {"k": 2},
    "on_policy_distillation": TEACHER, "jsd": TEACHER, "jsd_gradient": TEACHER, "gdpo": {"rewards": [TWO]},
    "gigpo": {"states": ["a", "a"]}, "hierarchical_grpo": {"roles": ["a", "a"], "groups": ["g", "g"]},
    "opo": LENGTHS, "reinforce_pp_baseline": LENGTHS, "length_adaptive_lambda": LENGTHS, "rebn": {"returns": TWO},
    "gae": VALUES, "lambda_returns": VALUES, "n_step_returns": VALUES, "vtrace": {**VALUES, "log_ratios": TWO},
    "potential_shaping": {"potentials": TWO}, "remax": {"baseline": 0.5}, "step_wise_grpo": {"steps": [1, 1]},
    "token_weights": LENGTHS,
}  # fmt: skip
BAD: dict[str, tuple[Any, ...]] = {  # what every estimator with this setting refuses
    "ddof": (-1, 2, 1.0, True), "eps": (-1e-9, INF, NAN, None), "singleton": ("one", None), "scale": ("std", None),
    "gamma": (-0.5, 1.01, NAN, "1"), "lam": (-0.5, 1.01, [1.5], [-0.5]), "decay": (1.5, -0.1, None), "n": (0, 1.5),
    "coef": (-0.1, 1e308), "beta": (-0.1, 1.1), "shift": (INF,), "omega": (-1.0,), "alpha": (0.0,), "tau": (0.0,),
    "clip": (0.0,), "clip_rho": (0.0,), "clip_pg_rho": (0.0,), "kl_coef": (-0.1,), "f_norm": (0.0,), "center": (1,),
    "estimator": ("k4",), "method": ("exact",), "count": ("tokens",), "baseline": ("median",), "drop": ("random",),
    "normalize": (1,), "step_norm": ("yes",),
}  # fmt: skip
ENDS = {"gamma": (0, 1, 0.0, 1.0), "lam": (0, 1, 0.0, 1.0), "decay": (0.0, 1.0)}


def arguments(name: str) -> dict[str, Any]:
    """Return the required arguments of an estimator."""
    given = {"rewards": TWO, **NEEDS.get(name, {})}
    return {key: value for key, value in given.items() if key in inspect.signature(adv.registry[name]).parameters}


@for_each("name", sorted(adv.registry))
def test_settings_are_checked(name: str) -> None:
    """A setting out of range is a ConfigError that begins with its name; the ends of a closed range are allowed."""
    function, given = adv.registry[name], arguments(name)
    for key in inspect.signature(function).parameters.keys() - given.keys():
        for bad in BAD.get(key, ()):
            with pytest.raises(ConfigError, match=f"^{key}"):
                function(**given, **{key: bad})
        for good in ENDS.get(key, ()):
            function(**given, **{key: good})


@for_each(
    ("name", "settings", "message"),
    [
        *[("rec", bad, "rng") for bad in ({"drop": "balance"}, {"drop": "balance", "rng": 7}, {"rng": 7})],
        *[("rec", {"rng": np.random.default_rng(0)}, "rng"), ("reinforce_pp", {"kl_coef": 0.1}, "kl")],
        *[("pass_at_k", bad, "k") for bad in ({"k": 2}, {"method": "analytic"}, {"method": "analytic", "k": 0})],
        *[("pkpo", bad, "k") for bad in ({"k": 1}, {"k": 0, "baseline": "none"})],
        *[(name, {"scale": "batch"}, "scale") for name in ("gigpo", "pass_at_k")],
        ("pkpo", {"baseline": "mean"}, "baseline"),
        *[("jsd_gradient", {"beta": beta}, "beta") for beta in (0.0, 1.0)],
        *[("token_weights", {"mode": bad}, "mode") for bad in ("mean", None)],
        *[("token_weights", {**NORM, "constant": bad}, "constant") for bad in (0, INF)],
        *[("token_weights", {"constant": 5}, "constant"), ("token_weights", NORM, "constant: is missing")],
        ("token_weights", {"groups": ["a", "b"]}, "groups"),
        ("token_weights", {"mode": "prompt-mean"}, "groups: is missing"),
    ],
)
def test_settings_of_one_estimator(name: str, settings: dict[str, Any], message: str) -> None:
    """Settings that are refused together, or by one estimator alone."""
    with pytest.raises(ConfigError, match=rf"^{message}\b"):
        adv.registry[name](**{**arguments(name), **settings})


def test_the_largest_numbers() -> None:
    """1e150 is the largest reward, weight and value, and 2^53 - 1 the longest length; both are allowed."""
    assert np.isfinite(adv.grpo([1e150, -1e150])).all()
    assert np.isfinite(adv.gdpo([TWO, TWO], weights=[1e150, -1e150 / 2])).all()
    assert adv.discounted_returns([0.0], bootstrap_value=[1e150]).tolist() == [1e150]
    assert adv.length_adaptive_lambda([1e150]).tolist() == [1.0]
    most = 2**53 - 1
    assert np.isfinite([*adv.opo(TWO, lengths=[1, most]), *adv.token_weights([1, most])]).all()


ANALYTIC: dict[str, Any] = {"method": "analytic"}
MISFITS: list[tuple[str, Any, dict[str, Any], str]] = [
    *[("length_adaptive_lambda", bad, {}, "lengths") for bad in ([], [0.0], [1, -1], [NAN], None, [INF], [1.1e150])],
    *[("opo", TWO, {"lengths": [1, bad]}, r"lengths\[1\]") for bad in (2**53, 2.0**53)],
    *[("token_weights", [1, bad], {}, r"lengths\[1\]") for bad in (2**53, 2.0**53, -1, 1.5, NAN, True)],
    *[("token_weights", bad, {}, "lengths") for bad in ([], None, "12", [[1], [2]])],
    ("token_weights", [1, 2], {"mode": "prompt-mean", "groups": ["a"]}, "groups"),
    *[("by_group", "grpo", {"rewards": [1.0], "groups": bad}, "groups: got") for bad in ("a", b"a", None, np.array(3))],
    *[("by_group", "grpo", {"rewards": TWO, "groups": ["a", bad]}, r"groups\[1\]") for bad in (None, NAN, ["b"])],
    *[("by_group", "grpo", {"rewards": bad, "groups": ["a", "b"]}, "rewards") for bad in ([[1.0, 2.0]], [1.0, INF])],
    ("by_group", "grpo", {"rewards": TWO, "groups": ["a"]}, "groups: has length 1"),
    ("by_group", "grpo", {"rewards": [], "groups": []}, "rewards: is empty"),
    *[("step_wise_grpo", TWO, {"steps": [1, bad]}, r"steps\[1\]") for bad in (2**31, 0, -1)],
    ("discounted_returns", [1.0, NAN], {}, r"rewards\[1\]: is nan"),
    ("discounted_returns", [[1.0], [1.0, NAN]], {"mask": [[1], [0, 1]]}, r"rewards\[1\]\[1\]: is nan"),
    ("gae", TWO, {"values": [1.0, NAN]}, r"values\[1\]"),
    ("vtrace", TWO, {"values": TWO, "log_ratios": [INF, 0.0]}, r"log_ratios\[0\]"),
    ("gae", [TWO] * 2, {"values": [TWO] * 2, "lam": [1.0]}, "lam"),
    ("gae", RAGGED, {"values": [[1.0], [2.0, INF]]}, r"values\[1\]\[1\]: is inf"),
    ("remax", [[1.0], [2.0]], {"baseline": [1.0, NAN]}, r"baseline\[1\]"),
    ("pass_at_k", TWO, {**ANALYTIC, "k": 3}, "rewards: has 2 rewards"),
    ("pass_at_k", [TWO, [0.0]], {**ANALYTIC, "k": 2}, r"rewards\[1\]: has 1"),
    ("pass_at_k", [1.0, 0.5], {**ANALYTIC, "k": 1}, r"rewards\[1\]: is 0.5"),
    ("pass_at_k", [TWO, [0.5, 0.5]], {**ANALYTIC, "k": 2}, r"rewards\[1\]\[0\]: is 0.5"),
    ("pkpo", [TWO, [0.0], [1.0]], {"k": 2}, r"rewards\[1\]: has 1 rewards"),
    *[("gigpo", TWO, {"states": bad}, f"states: got {bad!r}") for bad in ("ab", b"ab", 3)],
    ("gigpo", [[1.0], [0.0]], {"states": [["a"]]}, "states: has length 1"),
    ("gigpo", RAGGED, {"states": [["a"], ["b"]]}, r"states\[1\]"),
    ("gigpo", [[1.0], [0.0]], {"states": [["a"], [[1]]]}, r"states\[1\]\[0\]"),
    ("hierarchical_grpo", TWO, {"roles": ["a"], "groups": ["g", "g"]}, "roles"),
    ("hierarchical_grpo", TWO, {"roles": ["a", "a"], "groups": ["g", None]}, r"groups\[1\]"),
    ("grpo", [TWO, [1.0]], {"singleton": "error"}, r"rewards\[1\]: has one scored reward"),
    ("rloo", [1.0, NAN], {"singleton": "error"}, "rewards: has one scored reward"),
    *[("gdpo", bad, {}, "rewards: got") for bad in (1.0, "ab", [])], ("gdpo", np.ones(2), {}, r"rewards\[0\]: got"),
    ("gdpo", [[TWO], [[1.0]]], {}, r"rewards\[1\]"), ("gdpo", [[1.0, INF]], {}, r"rewards\[0\]\[1\]"),
    ("gdpo", [TWO, TWO], {"weights": [1.0, 1.1e150]}, r"weights\[1\]"), ("gdpo", [TWO], {"weights": TWO}, "weights"),
]  # fmt: skip


@for_each(("name", "rewards", "others", "message"), MISFITS)
def test_misfits_are_named(name: str, rewards: Any, others: dict[str, Any], message: str) -> None:
    """An argument that the formula cannot use is a DataError that names it."""
    with pytest.raises(DataError, match=rf"^{message}"):
        getattr(adv, name)(rewards, **others)


@for_each("name", [name for name in NEEDS if "sampling_logprobs" in NEEDS[name]])
def test_logprobs_are_at_most_0(name: str) -> None:
    """Rounding above 0 passes, a probability or a reversed sign is refused, masked tokens are not looked at."""
    function = adv.registry[name]
    near, far = [[-1.0], [-1.0, 1e-3]], [[-1.0], [-1.0, 0.2]]
    kept = dict.fromkeys(NEEDS[name], near)
    assert all(np.isfinite(row).all() for row in function(**kept))
    for wrong in kept:
        with pytest.raises(DataError, match=rf"^{wrong}\[0\]\[0\]: is -inf"):
            function(**{**kept, wrong: [[-INF], [-1.0, -1.0]]})
        with pytest.raises(DataError, match=rf"^{wrong}\[1\]\[1\]: is 0.2; expected a logprob"):
            function(**{**kept, wrong: far})
        np.testing.assert_array_equal(function(**{**kept, wrong: far}, mask=[[1], [1, 0]])[1][1], 0.0)
    largest = {key: [-1e150, -1.0] if key == "sampling_logprobs" else [-1.0, -1e150] for key in kept}
    for more in [{"estimator": k} for k in ("k1", "k2", "k3", "abs", "clamped")] if name == "kl_penalty" else [{}]:
        assert np.isfinite(function(**largest, **more, coef=1e150)).all()


def test_results_have_the_form_of_the_rewards() -> None:
    """One group stays 1-D, equal groups become 2-D, ragged ones a list; always float64, never the input itself."""
    one = adv.grpo(np.array([1, 0], np.int8))
    assert (one.shape, one.dtype) == ((2,), np.float64)
    assert adv.reinforce([[1], [0]]).shape == (2, 1)
    assert adv.grpo([np.zeros(2), np.ones(2)]).shape == adv.grpo([[1, 0], [0, 1]]).shape == (2, 2)
    ragged = adv.grpo([[1, 0], [0, 1, 1]])
    assert (type(ragged), [row.shape for row in ragged]) == (list, [(2,), (3,)])
    rewards = np.array([1.0, 0.0])
    adv.reinforce(rewards)[0] = adv.discounted_returns(rewards)[0] = 7.0
    adv.discounted_returns(rewards, gamma=0.5)
    assert rewards.tolist() == [1.0, 0.0]
    square = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    square.flags.writeable = False
    assert adv.dr_grpo(square).tolist() == [[-1, 0, 1], [-1, 0, 1]]


ZERO, WHITE, TIME = {"singleton": "zero"}, {"ddof": 1, "eps": 1e-6}, {"gamma": 1.0, "mask": None}
GROUP, FOLLOWED, JSD = WHITE | ZERO, TIME | {"bootstrap_value": 0.0}, {"beta": 0.5, "coef": 1.0, "mask": None}
DEFAULTS: dict[str, dict[str, Any]] = {
    "dr_grpo": ZERO, "hierarchical_grpo": ZERO, "maxrl": ZERO, "opo": ZERO, "rloo": ZERO,
    "asymre": {"shift": -0.1, **ZERO}, "gpg": {"count": "rewards", "f_norm": 1.0, **ZERO},
    "loo_std": {"eps": 1e-6, **ZERO}, "opmd": {"baseline": "mean", "tau": 1.0, **ZERO},
    "pkpo": {"baseline": "loo_minus_one", **ZERO}, "grpo": {"scale": "group", **GROUP},
    "gdpo": {"weights": None, **GROUP}, "reinforce_pp_baseline": GROUP,
    "pass_at_k": {"method": "max_second", "k": None, "scale": "group", **GROUP},
    "rec": {"normalize": False, "drop": None, "rng": None, **GROUP, "ddof": 0},
    "step_wise_grpo": {"step_norm": False, "scale": "group", **GROUP},
    "reinforce": {"normalize": False, **WHITE}, "running_normalization": WHITE, "running_baseline": {"decay": 0.95},
    "gigpo": {"omega": 1.0, "gamma": 1.0, "scale": "group", **WHITE},
    "reinforce_pp": {"kl": None, "kl_coef": 0.0, **TIME, **WHITE}, "remax": TIME, "potential_shaping": TIME,
    "discounted_returns": FOLLOWED, "gae": {"lam": 0.95, **FOLLOWED}, "lambda_returns": {"lam": 0.95, **FOLLOWED},
    "n_step_returns": {"n": 1, **FOLLOWED}, "length_adaptive_lambda": {"alpha": 0.05},
    "vtrace": {"lam": 1.0, "clip_rho": 1.0, "clip_pg_rho": 1.0, **FOLLOWED},
    "rebn": {"ddof": 1, "eps": 1e-9, "mask": None}, "entropy_bonus": {"coef": 0.01, "mask": None},
    "jsd": JSD, "jsd_gradient": JSD, "kl_penalty": {"coef": 0.01, "estimator": "k1", "center": False, "mask": None},
    "on_policy_distillation": {"coef": 1.0, "clip": None, "gamma": 0.0, "mask": None},
    "token_weights": {"mode": "token-mean", "constant": None, "groups": None},
}  # fmt: skip


def test_defaults() -> None:
    """Every default is part of the API; only rewards and labels are positional: no two arrays can be swapped."""
    added, gone = sorted(set(adv.registry) - set(DEFAULTS)), sorted(set(DEFAULTS) - set(adv.registry))
    assert not added, f"write down the default settings of {', '.join(added)} in DEFAULTS, above"
    assert not gone, f"{', '.join(gone)}: in DEFAULTS, but no estimator of the registry"
    allowed = {"rewards", "returns", "steps", "states", "roles", "groups", "lengths", "mode"}
    for name, function in adv.registry.items():
        parameters = inspect.signature(function).parameters.values()
        assert {p.name: p.default for p in parameters if p.default is not p.empty} == DEFAULTS[name], name
        assert {p.name for p in parameters if p.kind is not p.KEYWORD_ONLY} <= allowed, name
        assert ">>>" in function.__doc__, name
    assert adv.RunningBaseline().decay == 0.95
    assert adv.RunningNormalization() == adv.RunningNormalization(1, 1e-6, 0, 0.0, 0.0, INF, -INF)


def test_no_torch() -> None:
    """The numpy families import no torch."""
    code = "import sys, rlkit\nfor name in sys.argv[1:]: getattr(rlkit, name)\nprint('torch' in sys.modules)"
    families = ["advantages", "corrections", "filters", "metrics", "rewards", "schedules"]
    assert subprocess.check_output([sys.executable, "-c", code, *families], text=True) == "False\n"
