"""What estimators accept, and how they refuse the rest: by an error that names the argument and the place."""

from __future__ import annotations

import inspect
import pickle
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

BAD_REWARDS: list[tuple[Any, str]] = [
    (None, "rewards"),
    (1.0, "rewards"),
    ("1 0", "rewards"),
    (b"10", "rewards"),
    ({"a": 1.0}, "rewards"),
    ([], "rewards: is empty"),
    (np.zeros(0), "rewards: is empty"),
    (np.zeros((0, 3)), "rewards: is empty"),
    (np.zeros((3, 0)), r"rewards\[0\]: is empty"),
    ([[]], r"rewards\[0\]: is empty"),
    ([[1.0], []], r"rewards\[1\]: is empty"),
    ([1.0, None], r"rewards\[1\]: is None"),
    ([1.0, "1"], r"rewards\[1\]: is '1'"),
    ([1.0, True], r"rewards\[1\]: is True"),
    ([[1.0, 2.0], [3.0, None]], r"rewards\[1\]\[1\]: is None"),
    ([[1.0, 2.0], [False, 1.0]], r"rewards\[1\]\[0\]: is False"),
    ([[1.0, 2.0], 3.0], r"rewards\[1\]"),
    ([[1.0, 2.0], "ab"], r"rewards\[1\]"),
    (np.array([True, False]), "rewards: holds booleans"),
    (np.array(["a"]), "rewards"),
    (np.array([1.0, None], object), "rewards"),
    (np.array([1.0 + 2j]), "rewards"),
    (np.zeros((2, 2, 2)), "rewards"),
    ([np.zeros(2), np.zeros((2, 2))], r"rewards\[1\]"),
    ([np.zeros(2), np.array([True])], r"rewards\[1\]"),
    ([1.0, INF], r"rewards\[1\]: is inf"),
    ([[1.0, 2.0, 3.0], [1.0, -INF]], r"rewards\[1\]\[1\]: is -inf"),
    (np.array([[0.0, 1.0], [2.0, INF]], np.float32), r"rewards\[1\]\[1\]: is inf"),
    ([1e151, 0.0], r"rewards\[0\]"),
    ([[[1.0], [1.0, 2.0]], [1.0]], r"rewards\[0\]: got"),
]


@for_each(("rewards", "message"), BAD_REWARDS, ids=[repr(r)[:30] for r, _ in BAD_REWARDS])
def test_rows_refuse(rewards: Any, message: str) -> None:
    """Rows are numbers of at most 1e150, and an error says which one is not."""
    with pytest.raises(DataError, match=message):
        Rows.parse("rewards", rewards, nan=True)


BAD_PARTNERS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("read_like", [1.0, 2.0], {}, r"^x: has length 2; expected 3 \(as long as rewards\)"),
    ("read_like", [[1.0, 2.0, 3.0]], {}, r"^x: has shape \(1, 3\)"),
    ("read_like", None, {}, "^x: is None"),
    ("read_like", [1.0, "2", 3.0], {}, r"^x\[1\]: is '2'"),
    ("read_like", [1, 2, 0], {"boolean": True}, r"^x\[1\]: is 2"),
    ("read_like", [1, NAN, 0], {"boolean": True}, r"^x\[1\]"),
    ("read_like", [1, None, 0], {"boolean": True}, r"^x\[1\]"),
    ("read_like", ["1", "1", "1"], {"boolean": True}, r"^x\[0\]"),
    ("read_counts", [1.0, 2.0, 1.5], {}, r"^x\[2\]: is 1.5; expected an integer >= 0"),
    ("read_counts", [1.0, -1.0, 1.0], {}, r"^x\[1\]"),
    ("read_counts", [1.0, NAN, 1.0], {}, r"^x\[1\]"),
    ("read_counts", [1, 2, 0], {"low": 1}, r"^x\[2\]: is 0.0; expected an integer >= 1"),
    ("read_each", NAN, {}, "^x: got nan"),
    ("read_each", None, {}, "^x: got None"),
    ("read_each", 1.1e150, {}, "^x: got"),
    ("read_each", -1.1e150, {}, "^x: got"),
    ("read_each", True, {}, "^x: got True"),
    ("read_each", [1.0, 2.0], {}, "^x: has shape"),
    ("read_each", [[1.0], [1.0, 2.0]], {}, "^x: has 2 rows"),
    ("read_each", [INF], {}, r"^x\[0\]"),
]


@for_each(("read", "value", "settings", "message"), BAD_PARTNERS)
def test_partners_of_rows_are_refused(read: str, value: Any, settings: dict[str, Any], message: str) -> None:
    """What goes with rows has their layout, or is one number for each."""
    rows = Rows.parse("rewards", [1.0, 2.0, 3.0])
    with pytest.raises(DataError, match=message):
        getattr(rows, read)("x", value, **settings)


def test_partners_of_ragged_rows() -> None:
    """A row of another length is named."""
    rows = Rows.parse("rewards", [[1.0], [2.0, 3.0]])
    for value, message in (
        ([[1.0], [2.0]], r"^x\[1\]: has length 1; expected 2"),
        ([1, 1, 1], r"^x: has shape \(3,\)"),
    ):
        with pytest.raises(DataError, match=message):
            rows.read_like("x", value)
    with pytest.raises(DataError, match=r"^x\[1\]\[1\]: is inf"):
        rows.check_finite("x", rows.read_like("x", [[1.0], [2.0, INF]]))


TWO = [1.0, 0.0]
TWO_LOGPROBS = [-1.0, -2.0]
NEEDS: dict[str, dict[str, Any]] = {  # what an estimator cannot do without, besides two rewards
    "entropy_bonus": {"sampling_logprobs": TWO_LOGPROBS},
    "gae": {"values": TWO},
    "gdpo": {"rewards": [TWO]},
    "gigpo": {"states": ["a", "a"]},
    "hierarchical_grpo": {"roles": ["a", "a"], "groups": ["g", "g"]},
    "jsd": {"teacher_logprobs": TWO_LOGPROBS, "sampling_logprobs": TWO_LOGPROBS},
    "jsd_gradient": {"teacher_logprobs": TWO_LOGPROBS, "sampling_logprobs": TWO_LOGPROBS},
    "kl_penalty": {"reference_logprobs": TWO_LOGPROBS, "sampling_logprobs": TWO_LOGPROBS},
    "lambda_returns": {"values": TWO},
    "n_step_returns": {"values": TWO},
    "on_policy_distillation": {"teacher_logprobs": TWO_LOGPROBS, "sampling_logprobs": TWO_LOGPROBS},
    "opo": {"lengths": [1, 2]},
    "pkpo": {"k": 2},
    "potential_shaping": {"potentials": TWO},
    "rebn": {"returns": TWO},
    "reinforce_pp_baseline": {"lengths": [1, 2]},
    "remax": {"baseline": 0.5},
    "step_wise_grpo": {"steps": [1, 1]},
    "vtrace": {"values": TWO, "log_ratios": TWO},
    "length_adaptive_lambda": {"lengths": [1, 2]},
}
SHARED = {"ddof": [-1, 2], "eps": [-1e-9, INF], "gamma": [-0.5, 1.01], "lam": [-0.5, 1.01], "singleton": ["one", None]}


BAD_SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "asymre": {"shift": (INF,)},
    "discounted_returns": {"gamma": (NAN, "1")},
    "entropy_bonus": {"coef": (-0.1,)},
    "gae": {"lam": ([1.5], [-0.5])},
    "gigpo": {"omega": (-1.0,), "scale": ("batch",)},
    "gpg": {"count": ("tokens",), "f_norm": (0.0,)},
    "grpo": {"scale": ("std", None), "ddof": (1.0, True), "eps": (NAN, None)},
    "jsd": {"beta": (-0.1, 1.1)},
    "jsd_gradient": {"beta": (0.0, 1.0)},
    "kl_penalty": {"estimator": ("k4",), "center": (1,)},
    "length_adaptive_lambda": {"alpha": (0.0,)},
    "n_step_returns": {"n": (0, 1.5)},
    "on_policy_distillation": {"clip": (0.0,)},
    "opmd": {"baseline": ("median",), "tau": (0.0,)},
    "pass_at_k": {"method": ("exact",), "k": (2,), "scale": ("batch",)},
    "pkpo": {"k": (1,), "baseline": ("mean",)},
    "rec": {"drop": ("random",), "rng": (7, np.random.default_rng(0))},
    "reinforce": {"normalize": (1,)},
    "reinforce_pp": {"kl_coef": (-0.1,)},
    "step_wise_grpo": {"step_norm": ("yes",), "scale": ("task",)},
    "vtrace": {"clip_rho": (0.0,), "clip_pg_rho": (0.0,)},
}
BAD_TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    ("rec", {"drop": "balance"}, "rng"),
    ("rec", {"drop": "balance", "rng": 7}, "rng"),
    ("pass_at_k", {"method": "analytic"}, "k"),
    ("pass_at_k", {"method": "analytic", "k": 0}, "k"),
    ("pkpo", {"k": 0, "baseline": "none"}, "k"),
    ("reinforce_pp", {"kl_coef": 0.1}, "kl"),
]
CASES = [
    (name, {key: bad}, key) for name, each in BAD_SETTINGS.items() for key, values in each.items() for bad in values
]


def arguments(name: str) -> dict[str, Any]:
    """What the estimator has to be given."""
    given = {"rewards": TWO, **NEEDS.get(name, {})}
    return {key: value for key, value in given.items() if key in inspect.signature(adv.registry[name]).parameters}


@for_each(("name", "settings", "message"), CASES + BAD_TOGETHER)
def test_bad_settings(name: str, settings: dict[str, Any], message: str) -> None:
    """A setting out of range is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=rf"^{message}"):
        adv.registry[name](**{**arguments(name), **settings})


@for_each("name", sorted(adv.registry))
def test_shared_settings_are_checked_by_all(name: str) -> None:
    """A setting that many estimators have is checked by each of them, and its ends are allowed."""
    function = adv.registry[name]
    parameters = inspect.signature(function).parameters
    given = arguments(name)
    for key in parameters.keys() & SHARED.keys():
        for bad in SHARED[key]:
            with pytest.raises(ConfigError, match=f"^{key}"):
                function(**given, **{key: bad})
    for key in parameters.keys() & {"gamma", "lam"}:
        for good in (0, 1, 0.0, 1.0):
            function(**given, **{key: good})


@for_each("name", sorted(set(adv.registry) - {"running_baseline", "running_normalization"}))
def test_inputs_are_parsed_by_all(name: str) -> None:
    """Each array that an estimator takes is refused by name where it holds text, or lacks an entry."""
    function = adv.registry[name]
    given = arguments(name)
    if "mask" in inspect.signature(function).parameters:
        given["mask"] = [1, 1]
    arrays = [key for key in given if isinstance(given[key], list) and key not in ("states", "roles", "groups")]
    for key in arrays:
        for bad in ([*given[key][:-1], "text"], [*given[key][:-1], None]):
            with pytest.raises(DataError, match=f"^{key}"):
                function(**{**given, key: bad})
        if len(arrays) > 1:
            with pytest.raises(DataError, match=f"^({'|'.join(arrays)})"):
                function(**{**given, key: [*given[key], given[key][0]]})


def test_the_largest_numbers() -> None:
    """1e150 is the largest reward, weight and value, and itself allowed."""
    assert np.isfinite(adv.grpo([1e150, -1e150])).all()
    assert np.isfinite(adv.gdpo([TWO, TWO], weights=[1e150, -1e150 / 2])).all()
    assert adv.discounted_returns([0.0], bootstrap_value=[1e150]).tolist() == [1e150]
    with pytest.raises(DataError, match=r"^weights\[1\]"):
        adv.gdpo([TWO, TWO], weights=[1.0, 1.1e150])
    assert adv.length_adaptive_lambda([1e150]).tolist() == [1.0]
    with pytest.raises(DataError, match=r"^lengths\[0\]"):
        adv.length_adaptive_lambda([1.1e150])


def test_the_longest_lengths() -> None:
    """Lengths are whole numbers that float64 holds exactly: below 2^53."""
    most = 2**53 - 1
    assert np.isfinite(adv.opo(TWO, lengths=[1, most])).all()
    assert np.isfinite(adv.token_weights([1, most])).all()
    for refused in (2**53, 2.0**53):
        with pytest.raises(DataError, match=r"^lengths\[1\]"):
            adv.opo(TWO, lengths=[1, refused])
        with pytest.raises(DataError, match=r"^lengths\[1\]"):
            adv.token_weights([1, refused])
    with pytest.raises(DataError, match=r"^steps\[1\]"):
        adv.step_wise_grpo(TWO, [1, 2**31])


MISFITS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("discounted_returns", [1.0, NAN], {}, r"rewards\[1\]: is nan"),
    ("discounted_returns", [[1.0], [1.0, NAN]], {"mask": [[1], [0, 1]]}, r"rewards\[1\]\[1\]: is nan"),
    ("gae", [1.0, 2.0], {"values": [1.0, NAN]}, r"values\[1\]"),
    ("vtrace", [1.0], {"values": [1.0], "log_ratios": [INF]}, r"log_ratios\[0\]"),
    ("gae", [[1.0], [2.0]], {"values": [[1.0], [2.0]], "lam": [1.0]}, "lam"),
    ("remax", [[1.0], [2.0]], {"baseline": [1.0, NAN]}, r"baseline\[1\]"),
    ("pass_at_k", [1.0, 0.0], {"method": "analytic", "k": 3}, "rewards: has 2 rewards"),
    ("pass_at_k", [[1.0, 0.0], [0.0]], {"method": "analytic", "k": 2}, r"rewards\[1\]: has 1"),
    ("pass_at_k", [1.0, 0.5], {"method": "analytic", "k": 1}, r"rewards\[1\]: is 0.5"),
    ("pass_at_k", [[1.0, 0.0], [0.5, 0.5]], {"method": "analytic", "k": 2}, r"rewards\[1\]\[0\]: is 0.5"),
    ("pkpo", [1.0, 0.0], {"k": 3}, "rewards"),
    ("pkpo", [[1.0, 0.0], [0.0], [1.0]], {"k": 2}, r"rewards\[1\]: has 1 rewards"),
    ("gigpo", [1.0, 0.0], {"states": "ab"}, "states: got 'ab'"),
    ("gigpo", [[1.0], [0.0]], {"states": b"ab"}, "states: got b'ab'"),
    ("gigpo", [[1.0], [0.0]], {"states": 3}, "states: got 3"),
    ("gigpo", [[1.0], [0.0]], {"states": [["a"]]}, "states"),
    ("gigpo", [[1.0], [0.0, 1.0]], {"states": [["a"], ["b"]]}, r"states\[1\]"),
    ("gigpo", [[1.0], [0.0]], {"states": [["a"], [[1]]]}, r"states\[1\]\[0\]"),
    ("hierarchical_grpo", [1.0, 0.0], {"roles": ["a"], "groups": ["g", "g"]}, "roles"),
    ("hierarchical_grpo", [1.0, 0.0], {"roles": ["a", "a"], "groups": ["g", None]}, r"groups\[1\]"),
    ("grpo", [[1.0, 2.0], [1.0]], {"singleton": "error"}, r"rewards\[1\]: has one scored reward"),
    ("rloo", [1.0, NAN], {"singleton": "error"}, "rewards: has one scored reward"),
    ("step_wise_grpo", [1.0, 0.0], {"steps": [0, -1]}, r"steps\[0\]"),
    ("gdpo", 1.0, {}, "rewards: got"),
    ("gdpo", "ab", {}, "rewards: got"),
    ("gdpo", np.array([1.0, 2.0]), {}, r"rewards\[0\]: got"),
    ("gdpo", [[[1.0, 2.0]], [[1.0]]], {}, r"rewards\[1\]"),
    ("gdpo", [], {}, "rewards"),
    ("gdpo", [[1.0, 2.0]], {"weights": [1.0, 1.0]}, "weights"),
    ("gdpo", [[1.0, 2.0]], {"weights": [NAN]}, r"weights\[0\]"),
    ("gdpo", [[1.0, INF]], {}, r"rewards\[0\]\[1\]"),
]


@for_each(("name", "rewards", "others", "message"), MISFITS)
def test_misfits(name: str, rewards: Any, others: dict[str, Any], message: str) -> None:
    """An argument that the formula cannot use is a DataError that names it."""
    with pytest.raises(DataError, match=rf"^{message}"):
        adv.registry[name](rewards, **others)


@for_each("lengths", [[], [0.0], [1.0, -1.0], [NAN], None, [INF]])
def test_length_adaptive_lambda_refuses(lengths: Any) -> None:
    """Lengths have to be positive numbers."""
    with pytest.raises(DataError, match="^lengths"):
        adv.length_adaptive_lambda(lengths)


TOKEN_PAIRS = {
    "on_policy_distillation": "teacher",
    "jsd": "teacher",
    "jsd_gradient": "teacher",
    "kl_penalty": "reference",
}


@for_each("name", [*TOKEN_PAIRS, "entropy_bonus"])
def test_logprobs_are_not_positive(name: str) -> None:
    """A logprob is at most 0: rounding passes, a probability or a reversed sign does not, masked ones do not matter."""
    function, others = adv.registry[name], [TOKEN_PAIRS[name] + "_logprobs"] if name in TOKEN_PAIRS else []
    near, far = [[-1.0], [-1.0, 1e-3]], [[-1.0], [-1.0, 0.2]]
    kept = dict.fromkeys(["sampling_logprobs", *others], near)
    assert all(np.isfinite(row).all() for row in function(**kept))
    for wrong in kept:
        with pytest.raises(DataError, match=rf"^{wrong}\[0\]\[0\]: is -inf"):
            function(**{**kept, wrong: [[-INF], [-1.0, -1.0]]})
        with pytest.raises(DataError, match=rf"^{wrong}\[1\]\[1\]: is 0.2; expected a logprob"):
            function(**{**kept, wrong: far})
        masked = function(**{**kept, wrong: far}, mask=[[1], [1, 0]])
        np.testing.assert_array_equal(masked[1][1], 0.0)


@for_each("name", [*TOKEN_PAIRS, "entropy_bonus"])
@for_each("estimator", ["k1", "k2", "k3", "abs", "clamped"])
def test_largest_coefficient(name: str, estimator: str) -> None:
    """The largest coefficient on the largest logprobs stays finite; beyond it is a ConfigError."""
    given = {other: [-1e150, -1.0] for other in ["sampling_logprobs"]}
    if name in TOKEN_PAIRS:
        given[TOKEN_PAIRS[name] + "_logprobs"] = [-1.0, -1e150]
    more = {"estimator": estimator} if name == "kl_penalty" else {}
    assert np.isfinite(adv.registry[name](**given, **more, coef=1e150)).all()
    with pytest.raises(ConfigError, match="^coef"):
        adv.registry[name](**given, **more, coef=1e308)


def test_forms() -> None:
    """One group stays 1-D, equal groups become 2-D, ragged ones a list; always float64, never the input itself."""
    one = adv.grpo(np.array([1, 0], np.int8))
    assert one.shape == (2,)
    assert one.dtype == np.float64
    assert adv.grpo([[1, 0], [0, 1]]).shape == (2, 2)
    assert adv.reinforce([[1], [0]]).shape == (2, 1)
    assert adv.grpo([np.zeros(2), np.ones(2)]).shape == (2, 2)
    ragged = adv.grpo([[1, 0], [0, 1, 1]])
    assert isinstance(ragged, list)
    assert [row.shape for row in ragged] == [(2,), (3,)]
    rewards = np.array([1.0, 0.0])
    adv.reinforce(rewards)[0] = 7.0
    adv.discounted_returns(rewards)[0] = 7.0
    adv.discounted_returns(rewards, gamma=0.5)
    assert rewards.tolist() == [1.0, 0.0]


def test_read_only_and_strided_input() -> None:
    """Input may be read-only, a view, or Fortran-ordered."""
    square = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    square.flags.writeable = False
    np.testing.assert_array_equal(adv.dr_grpo(square), [[-1, 0, 1], [-1, 0, 1]])
    np.testing.assert_array_equal(adv.dr_grpo(np.arange(6.0)[::2]), [-2, 0, 2])


def test_keyword_only() -> None:
    """Two arrays cannot be swapped by position: only rewards, and labels beside them, are positional."""
    allowed = {"rewards", "returns", "steps", "states", "roles", "groups", "lengths", "mode"}
    for name, function in adv.registry.items():
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.kind is parameter.KEYWORD_ONLY or parameter.name in allowed, name


WHITE = {"ddof": 1, "eps": 1e-6}
DEFAULTS: dict[str, dict[str, Any]] = {
    "asymre": {"shift": -0.1, "singleton": "zero"},
    "discounted_returns": {"gamma": 1.0, "bootstrap_value": 0.0, "mask": None},
    "dr_grpo": {"singleton": "zero"},
    "entropy_bonus": {"coef": 0.01, "mask": None},
    "gae": {"bootstrap_value": 0.0, "mask": None, "gamma": 1.0, "lam": 0.95},
    "gdpo": {"weights": None, "ddof": 1, "eps": 1e-6, "singleton": "zero"},
    "gigpo": {"omega": 1.0, "gamma": 1.0, "scale": "group", "ddof": 1, "eps": 1e-6},
    "gpg": {"count": "rewards", "f_norm": 1.0, "singleton": "zero"},
    "grpo": {"scale": "group", "ddof": 1, "eps": 1e-6, "singleton": "zero"},
    "hierarchical_grpo": {"singleton": "zero"},
    "jsd": {"beta": 0.5, "coef": 1.0, "mask": None},
    "jsd_gradient": {"beta": 0.5, "coef": 1.0, "mask": None},
    "kl_penalty": {"coef": 0.01, "estimator": "k1", "center": False, "mask": None},
    "lambda_returns": {"bootstrap_value": 0.0, "mask": None, "gamma": 1.0, "lam": 0.95},
    "length_adaptive_lambda": {"alpha": 0.05},
    "loo_std": {"eps": 1e-6, "singleton": "zero"},
    "maxrl": {"singleton": "zero"},
    "n_step_returns": {"n": 1, "bootstrap_value": 0.0, "mask": None, "gamma": 1.0},
    "on_policy_distillation": {"coef": 1.0, "clip": None, "gamma": 0.0, "mask": None},
    "opmd": {"baseline": "mean", "tau": 1.0, "singleton": "zero"},
    "opo": {"singleton": "zero"},
    "pass_at_k": {**WHITE, "method": "max_second", "k": None, "scale": "group", "singleton": "zero"},
    "pkpo": {"baseline": "loo_minus_one", "singleton": "zero"},
    "potential_shaping": {"gamma": 1.0, "mask": None},
    "rebn": {"ddof": 1, "eps": 1e-9, "mask": None},
    "rec": {"normalize": False, "ddof": 0, "eps": 1e-6, "drop": None, "rng": None, "singleton": "zero"},
    "reinforce": {"normalize": False, "ddof": 1, "eps": 1e-6},
    "reinforce_pp": {"kl": None, "kl_coef": 0.0, "gamma": 1.0, "mask": None, "ddof": 1, "eps": 1e-6},
    "reinforce_pp_baseline": {"ddof": 1, "eps": 1e-6, "singleton": "zero"},
    "remax": {"gamma": 1.0, "mask": None},
    "rloo": {"singleton": "zero"},
    "running_baseline": {"decay": 0.95},
    "running_normalization": {"ddof": 1, "eps": 1e-6},
    "step_wise_grpo": {"step_norm": False, "scale": "group", "ddof": 1, "eps": 1e-6, "singleton": "zero"},
    "token_weights": {"mode": "token-mean", "constant": None, "groups": None},
    "vtrace": {"bootstrap_value": 0.0, "mask": None, "gamma": 1.0, "lam": 1.0, "clip_rho": 1.0, "clip_pg_rho": 1.0},
}


def test_defaults() -> None:
    """Every default number is part of the API."""
    added, gone = sorted(set(adv.registry) - set(DEFAULTS)), sorted(set(DEFAULTS) - set(adv.registry))
    assert not added, f"write down the default settings of {', '.join(added)} in DEFAULTS, above"
    assert not gone, f"{', '.join(gone)}: in DEFAULTS, but no estimator of the registry"
    for name, function in adv.registry.items():
        parameters = inspect.signature(function).parameters.values()
        assert {p.name: p.default for p in parameters if p.default is not p.empty} == DEFAULTS[name], name


def test_public_names() -> None:
    """What is public is listed, documented, and carries the module that users import it from."""
    for name in adv.__all__:
        public = getattr(adv, name)
        if name not in ("register", "registry"):
            assert public.__module__ == "rlkit.advantages"
            assert ">>>" in public.__doc__, name
    assert all(summary for _, summary in adv.registry.table())


def test_tensors() -> None:
    """Torch tensors are taken as arrays, with gradient or without; rlkit does not import torch for it."""
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.0, 0.0], requires_grad=True)
    expected = adv.grpo([1.0, 0.0])
    np.testing.assert_array_equal(adv.grpo(tensor), expected)
    np.testing.assert_array_equal(adv.grpo([tensor, tensor])[1], expected)
    np.testing.assert_array_equal(adv.grpo([tensor, torch.tensor([1.0, 0.0, 0.0])])[0], expected)


def test_no_torch() -> None:
    """The numpy families import no torch."""
    modules = "advantages corrections filters metrics rewards schedules"
    code = (
        "import sys\n" + "".join(f"import rlkit.{name}\n" for name in modules.split()) + "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_objects_survive_pickling() -> None:
    """Estimators and running baselines can be sent to another process."""
    assert pickle.loads(pickle.dumps(adv.grpo)) is adv.grpo
    baseline = adv.RunningBaseline(decay=0.5)
    baseline.update([1.0], ["a"])
    assert pickle.loads(pickle.dumps(baseline)) == baseline
