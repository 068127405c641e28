"""What a checkpoint holds of the objects that a loop keeps: every number, every object that the package offers."""

from __future__ import annotations

import json
import math
import random

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.advantages import running_baseline, running_normalization
from rlkit.losses.kl import adaptive_coefficient, adaptive_entropy
from rlkit.runs import Retention, Run
from rlkit.runs.state import decode, encode
from tests.each import for_each

NUMBERS = [
    *(True, 3, -(2**70), 0.1, 1e-320, -0.0, math.inf, -math.inf, math.nan),
    *(np.bool_(True), np.bool_(False), np.int8(-3), np.uint64(2**64 - 1), np.float16(0.1), np.float32(np.inf)),
    *(np.float64(np.nan), np.longdouble("1.1"), np.complex64(1j), 1 + 2j, np.str_("text"), np.bytes_(b"x")),
    *(np.datetime64("2026-01-01"), np.timedelta64(3, "s")),
]
ARRAYS = [
    *(np.array([]), np.array(0.5), np.array([[1.0, np.nan], [-np.inf, -0.0]]), np.arange(6, dtype=">i4").reshape(2, 3)),
    *(np.zeros((0, 3), np.float32), np.array([True]), np.array(["a", "bcd"]), np.array([1j]), np.arange(9)[::2]),
]


def same(one, two):
    """Bit for bit, where -0.0 is not 0.0 and NaN is NaN."""
    if type(two) is int:
        return one == two
    one, two = np.asarray(one), np.asarray(two)
    return one.shape == two.shape and one.tobytes() == two.astype(one.dtype).tobytes()


@for_each("value", [*NUMBERS, *ARRAYS], ids=repr)
def test_every_number_comes_back(value):
    """As strict JSON, on its own and inside of lists, tuples and dicts."""
    for wrapped, inner in (
        (value, lambda x: x),
        ([value], lambda x: x[0]),
        ((1, value), lambda x: x[1]),
        ({"__float__": {"a": value}}, lambda x: x["__float__"]["a"]),
    ):
        text = json.dumps(encode("it", wrapped), allow_nan=False)
        found = inner(decode(json.loads(text)))
        assert same(found, value)
        assert isinstance(found, np.ndarray) == isinstance(value, np.ndarray)
        if isinstance(value, np.ndarray):
            assert found.dtype == value.dtype


class Counter:
    count = 0

    def state(self):
        return self.count

    def restore(self, state):
        self.count = state


@attrs.define
class Nested:
    baseline: object = attrs.field(factory=running_baseline)
    draws: object = attrs.field(factory=lambda: np.random.default_rng(3))
    best: float = -math.inf


def use_nested(kept):
    kept.baseline.update([1.0])
    kept.best = np.float32(0.5)
    return repr(kept.baseline), kept.draws.normal()


KINDS = {  # name -> how it is made, and how a loop uses it
    "generator": (lambda: np.random.default_rng(3), lambda kept: kept.normal()),
    "random": (lambda: random.Random(3), lambda kept: kept.random()),
    "own": (Counter, lambda kept: setattr(kept, "count", kept.count + 5) or kept.count),
    "dict": (lambda: {"a": np.float32([1.5, 2.5]), ("x", 2): [1, (2, 3)]}, lambda kept: kept.update(n=np.arange(6))),
    "list": (lambda: [1, None, True, "text", 0.1], lambda kept: kept.append(1e-320)),
    "nested": (Nested, use_nested),  # whose fields come back as objects, not as dicts
    "baseline": (running_baseline, lambda kept: kept.update([1.0, 2.0], ["a", ("b", 3)])),
    "normalization": (running_normalization, lambda kept: kept.update([1.0, 2.0])),
    "coefficient": (lambda: adaptive_coefficient(coef=0.1, target=0.1, horizon=10), lambda kept: kept.update(0.9, 5)),
    "entropy": (adaptive_entropy, lambda kept: kept.update(0.1)),
}


def test_every_kind_comes_back(tmp_path):
    """Fresh, used, and used again after the run was resumed; everything that the package offers to keep, too."""
    whole = {name: make() for name, (make, _) in KINDS.items()}
    for repeat in range(3):
        with Run(tmp_path, seed=0, trackers=()) as run:
            run.connect("toy")
            for name, (make, use) in KINDS.items():
                kept = run.keep(name, make())
                for _ in range(repeat):
                    assert repr(use(kept)) == repr(use(whole[name])), name
                if name not in ("generator", "random", "own", "nested"):  # whose texts are not their states
                    assert repr(kept) == repr(whole[name])
            run.checkpoint()


def test_metrics_of_a_checkpoint(tmp_path):
    """Infinities and NaN are kept; NaN is never the best."""
    with Run(tmp_path, trackers=(), retention=Retention(last=1, best=1, metric="score")) as run:
        policy = run.connect("toy")
        for score in (np.float32(0.5), math.nan, -math.inf, np.int64(0)):
            run.checkpoint(policy, metrics={"score": score, "flag": np.bool_(True)})
            run.step += 1
        assert [record.metrics for record in rlkit.runs.records(tmp_path)] == [
            {"score": 0.5, "flag": 1.0},
            {"score": 0.0, "flag": 1.0},
        ]
        for bad in ({"score": "high"}, {3: 1.0}, {"score": [1.0]}, 3):
            with pytest.raises(rlkit.DataError, match=r"checkpoint\(metrics\)"):
                run.checkpoint(policy, metrics=bad)


SETTINGS = {  # name -> value, and how config.json has it
    "inf": (math.inf, "Infinity"),
    "numpy": (np.float64(1e-4), 1e-4),
    "single": (np.float32(0.5), 0.5),
    "flag": (np.bool_(True), True),
    "none": (np.array([]), []),
    "nan": ([np.nan, {"deep": -np.inf}], ["NaN", {"deep": "-Infinity"}]),
    "array": (np.array([[1.5, np.inf]]), [[1.5, "Infinity"]]),
    "api_key": (np.array([1.0]), "***"),
    "token": (np.array([]), "***"),
    "words": (np.array(["sk-proj-abcdefghijklmnopqrst0123", "x"]), ["***", "x"]),
    "other": (complex(1, 2), "(1+2j)"),
}


def test_a_config_of_any_numbers(tmp_path):
    """It is written as strict JSON, compared with itself without a warning, and shown by the report."""
    for _ in range(2):
        with Run(tmp_path, config={name: given for name, (given, _) in SETTINGS.items()}, trackers=("jsonl",)) as run:
            run.log({"a": math.inf})
    written = json.loads((tmp_path / "config.json").read_text(), parse_constant=pytest.fail)
    assert written == {name: expected for name, (_, expected) in SETTINGS.items()}
    page = run.report().read_text()
    for name in ("inf", "other"):
        assert f'<th scope="row">{name}</th><td>{written[name]}</td>' in page
