"""The data that flows and the settings: what they hold, what they refuse, and the range of every field and argument."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit import (
    Adam,
    ConfigError,
    DataError,
    Datum,
    Lora,
    Sample,
    SamplingParams,
    corrections,
    filters,
    metrics,
    rewards,
    schedules,
)
from tests.each import for_each
from tests.properties import examples

NAN, INF, BIG = float("nan"), float("inf"), 1e150
UP, DOWN = np.nextafter(0.0, 1.0), np.nextafter(0.0, -1.0)
T, M = [5, 6, 7, 8], [0, 0, 1, 1]


def test_defaults_are_pinned():
    """Default numbers are part of the API."""
    assert repr(SamplingParams()) == (
        "SamplingParams(max_tokens=64, temperature=1.0, top_p=1.0, top_k=-1, stop=None, min_p=0.0, "
        "repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)"
    )
    optional = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert optional == rlkit.types.OPTIONAL_OPTIONS  # what not every sampler has
    assert repr(Adam()) == (
        "Adam(learning_rate=0.0001, beta1=0.9, beta2=0.95, eps=1e-08, weight_decay=0.0, grad_clip_norm=0.0)"
    )
    assert repr(Lora()) == (
        "Lora(rank=32, alpha=32.0, seed=None, train_mlp=True, train_attn=True, train_unembed=None, target_modules=None)"
    )


def test_inputs_are_aligned():
    """[n] is scattered, [T] is kept, scalars stay scalars, and what is behind the mask becomes 0."""
    datum = Datum(T, M, {"a": [1.0, 2.0], "b": [NAN, INF, 3.0, 4.0], "c": 5.0, "d": [[1.0, 2.0], [3.0, 4.0]]})
    assert datum.inputs["a"].tolist() == [0, 0, 1, 2]
    assert datum.inputs["b"].tolist() == [0, 0, 3, 4]
    assert datum.inputs["c"].shape == ()
    assert datum.inputs["d"].tolist() == [[0, 0], [0, 0], [1, 2], [3, 4]]
    assert {x.dtype for x in datum.inputs.values()} == {np.dtype(np.float32)}


def test_integers_stay_integers_but_for_known_reals():
    """target_tokens are int64; advantages given as ints are float32 all the same."""
    real = ("advantages", "weights", "values", "old_values", "returns", "rewards", "entropy", "reference_logprobs")
    datum = Datum(T, M, {"target_tokens": [[1, -1], [2, 3]], "mine": [7, 8], **{name: [-1, -2] for name in real}})
    assert datum.inputs["target_tokens"].dtype == datum.inputs["mine"].dtype == np.int64
    assert {name: datum.inputs[name].dtype for name in real} == dict.fromkeys(real, np.dtype(np.float32))


def test_arrays_are_copies_and_read_only():
    """What was checked stays as it was, whatever happens to the caller's arrays."""
    tokens, mask, lp = np.array(T), np.array(M, bool), np.array([-1.0, -2.0], np.float32)
    datum = Datum(tokens, mask, {"lp": lp})
    tokens[:], lp[:] = 0, NAN
    assert datum.tokens.tolist() == T
    assert datum.inputs["lp"].tolist() == [0, 0, -1, -2]
    for array in (datum.tokens, datum.mask, datum.inputs["lp"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(TypeError):
        datum.inputs["x"] = lp
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        datum.tokens = tokens


def test_datum_copies_and_pickles():
    """A datum survives pickle and deepcopy with all it holds."""
    datum = Datum(T, M, {"a": [1.0, 2.0]}, temperature=0.7, truncated=True)
    for other in (pickle.loads(pickle.dumps(datum)), copy.deepcopy(datum), attrs.evolve(datum)):
        assert other.tokens.tolist() == T
        assert other.inputs["a"].tolist() == [0, 0, 1, 2]
        assert (other.temperature, other.truncated) == (0.7, True)
    for thing in (SamplingParams(temperature=0.5), Sample([1], [2], [-1.0], "length", top_k=3)):
        other = pickle.loads(pickle.dumps(attrs.evolve(thing, **RESHAPING)))
        assert {name: getattr(other, name) for name in RESHAPING} == RESHAPING


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 4))
@examples(50)
def test_select_inverts_expand(rest, k):
    """select(expand(x)) is x for [n] and [n, K], and expand is 0 elsewhere."""
    mask = np.array([False, *rest])
    datum = Datum(np.arange(mask.size), mask)
    n = int(mask.sum())
    for x in (np.random.default_rng(0).normal(size=n), np.random.default_rng(0).normal(size=(n, k))):
        assert np.array_equal(datum.select(datum.expand(x)), x)
        assert not datum.expand(x)[~mask].any()


def test_supervised():
    """The completion alone is masked in, with one weight or one for each of its tokens."""
    datum = Datum.supervised([1, 2], [3, 4, 5], weights=[0.5, 1, 2])
    assert datum.mask.tolist() == [False, False, True, True, True]
    assert datum.inputs["weights"].tolist() == [0, 0, 0.5, 1, 2]


def test_sample_datum():
    """A sample's datum has its own tokens and logprobs, the advantage on every token, and how it was drawn."""
    sample = Sample([1, 2], [3, 4], [-0.5, -0.25], temperature=0.7, top_p=0.9)
    datum = sample.datum(2.0, weights=0.5)
    assert datum.tokens.tolist() == [1, 2, 3, 4]
    assert datum.inputs["sampling_logprobs"].tolist() == [0, 0, -0.5, -0.25]
    assert datum.inputs["advantages"].tolist() == [0, 0, 2, 2]
    assert datum.inputs["weights"].shape == ()
    assert (datum.temperature, datum.truncated) == (0.7, True)
    assert sample.datum([1.0, -1.0]).inputs["advantages"].tolist() == [0, 0, 1, -1]
    assert not sample.datum(1.0, sampling_logprobs=[-1.0, -1.0]).truncated
    assert "advantages" not in sample.datum().inputs


BAD = [  # what is not a field's range alone; tests/test_shapes.py has shapes
    (lambda: Sample([1], [2], [-1.0]).datum(1.0, temperature=2.0), DataError, "temperature"),
    (lambda: Sample([1], [2], [-1.0]).datum(1.0, advantages=[1.0]), DataError, "both"),
    (lambda: Sample([1], [2], [-1.0]).datum([9.0, 1.0]), DataError, r"^advantage: has shape \(2,\)"),
    (lambda: Datum(T, M).with_inputs(temperature=0.5), DataError, "'temperature'; .*it is a field"),
    *[
        (lambda name=name, x=x: rlkit.connect("toy", **{name: x}), ConfigError, f"^{name}")
        for name, x in [("resume_from", ""), ("resume_from", False), ("folder", 3), ("lora", 3), ("model", 3)]
    ],
    *[
        (lambda x=x: Datum(x, M), DataError, "Datum.tokens")
        for x in (None, [], [True, False], [1, None, 3], [[1, 2], [3]])
    ],
    (lambda: Datum("text", M), DataError, "encode"),
    (lambda: Datum([1], [0]), DataError, "at least 2"),
    (lambda: Datum([1.0, 2.0], [0, 1]), DataError, "integers"),
    (lambda: Datum([1, -2, 3], [0, 1, 1]), DataError, r"tokens\[1\]"),
    (lambda: Datum.supervised([], [1]), DataError, "^prompt: .*at least 1"),
    (lambda: Datum.supervised([1], []), DataError, "^completion: .*at least 1"),
    (lambda: Datum(T, [0, 1]), DataError, "Datum.mask"),
    (lambda: Datum(T, [1, 0, 1, 1]), DataError, r"mask\[0\]"),
    (lambda: Datum(T, [0, 0, NAN, 1]), DataError, r"mask\[2\]"),
    (lambda: Datum(T, M, {1: 1.0}), DataError, "Datum.inputs"),
    (lambda: Datum(T, M, {"a b": 1.0}), DataError, "a b"),
    (lambda: Datum(T, M, {"target_tokens": np.zeros((2, 0), int)}), DataError, "target_tokens"),
    (lambda: Datum(T, M, {"a": [1.0, 2.0, 3.0]}), DataError, r"\(3,\)"),
    (lambda: Datum(T, M, {"a": [0, 0, NAN, 1]}), DataError, r"inputs\['a'\]\[2\]"),
    (lambda: Datum(T, M, {"a": [1.0, INF]}), DataError, r"inputs\['a'\]\[3\]"),
    (lambda: Datum(T, M, {"a": [1e300, 1.0]}), DataError, r"\[2\]"),
    (lambda: Datum(T, M, {"a": [True, False]}), DataError, "booleans"),
    *[
        (lambda x=x: Datum(T, M, {"a": x}), DataError, "'a'")
        for x in (NAN, None, "text", [[1.0], [2.0, 3.0]], [[[1]]] * 2)
    ],
    (lambda: Sample([1], [2], [NAN]), DataError, r"logprobs\[0\]"),
    *[
        (lambda stop=stop: SamplingParams(stop=stop), ConfigError, text)
        for stop, text in [("x", "tuple"), (("a", 1), r"\[0\]"), ((1, "a"), r"stop\[1\]"), ((1, -1), r"stop\[1\]")]
    ],
    (lambda: Lora(train_mlp=False, train_attn=False, train_unembed=False), ConfigError, "nothing"),
    *[
        (lambda x=x, flag=flag: Lora(target_modules=x, **{flag: False}), ConfigError, "expected one of them")
        for x in (("q",), "all-linear")
        for flag in ("train_mlp", "train_attn")
    ],
    *[(lambda c=c: c(max_token_count=1), TypeError, "max_token_count") for c in (SamplingParams, Adam, Lora)],
    *[(lambda c=c: c(*range(12)), TypeError, "positional") for c in (SamplingParams, Sample)],
]


@for_each(("call", "error", "match"), BAD)
def test_bad_values_are_named(call, error, match):
    """The error names the field and the index; a misspelt setting is a TypeError at once."""
    with pytest.raises(error, match=match):
        call()


# Ranges: the ends of a closed one are allowed, and what lies next beyond them is refused by name.
Ends = dict[str, tuple[list[Any], list[Any]]]
OPTIONS: Ends = {  # of SamplingParams and of Sample
    "temperature": ([0.0, 1e-3, 1e3], [-0.1, 9.9e-4, 1001.0, 1e-300, 1e300, NAN, "1"]),
    "top_p": ([UP, 1.0], [0.0, 1.1]),
    "top_k": ([-1, 1], [0, -2, True, -1.0]),
    "min_p": ([0.0, 1.0], [DOWN, 1.1, NAN]),
    "repetition_penalty": ([1e-3, 1e3], [0.0, -1.0, 9.9e-4, 1001.0]),
    "presence_penalty": ([-2.0, 2.0], [-2.1, 2.1, 3.0]),
    "frequency_penalty": ([-2.0, 2.0], [-2.1, 2.1, "0.1"]),
}
FLAG, NOT_NEGATIVE, STEPS = ([True, False], [1, 0]), ([0.0], [DOWN]), ([0, 1], [-1, 0.5])
FAR = ([-BIG, BIG], [-2 * BIG, 2 * BIG, NAN])
CLASSES: list[tuple[Any, dict[str, Any], Ends]] = [  # a class, what it needs, and the ends of each of its fields
    (SamplingParams, {}, {
        **OPTIONS, "max_tokens": ([1, 2**31 - 1], [0, True, 2.0, None, 2**31]),
        "stop": ([None, (), ("a",), (0, 1)], ["x", 3, ("",), (True,)])}),
    (Sample, {"prompt": [1], "tokens": [2], "logprobs": [-1.0]}, {
        **OPTIONS, "prompt": ([[0]], [[]]), "tokens": ([[0]], [[-1]]), "stop_reason": (["stop", "length"], ["cut"]),
        "logprobs": ([[0.1], [-1e30]], [[NAN], [-INF], [0.11]]), "version": STEPS,
        "versions": ([None, [0]], [[-1], [0.5]])}),
    (Datum, {"tokens": T, "mask": M}, {
        "tokens": ([[0, 1, 2, 3]], [[1]]), "mask": ([[0, 1, 1, 1]], [[0, 2, 1, 1]]), "inputs": ([{}], [None]),
        "temperature": OPTIONS["temperature"], "truncated": FLAG}),
    (Adam, {}, {
        "learning_rate": ([0.0], [DOWN, NAN, INF, None]), "beta1": ([0.0], [1.0, DOWN]), "beta2": ([0.0], [1.0, DOWN]),
        "eps": ([UP], [0.0]), "weight_decay": NOT_NEGATIVE, "grad_clip_norm": ([0.0], [DOWN, INF])}),
    (Lora, {}, {
        "rank": ([1], [0, 8.0]), "alpha": ([UP], [0]), "seed": ([0, None], [-1]), "train_mlp": FLAG, "train_attn": FLAG,
        "train_unembed": ([True, False, None], [1]),
        "target_modules": ([None, ("q",), "all-linear"], ["q", (), (1,)])}),
]  # fmt: skip
RATIOS = {"trainer_logprobs": [-1.0, -2.0], "sampling_logprobs": [-1.5, -1.0]}
SCORES = {"entropy": [0.5, 1.0], "logprobs": [-0.5, -1.0], "advantages": [-1.0, -1.0]}
SUMS = {"sum_p2": [0.5, 0.6], "sum_p2_logp": [-0.3, -0.2]}
LENGTHS = ([[0], [BIG]], [[DOWN], [2 * BIG]])
FUNCTIONS: list[tuple[Any, dict[str, Any], Ends]] = [  # the same of arguments
    (filters.overlong, {"lengths": [0, 3], "max_length": 3}, {
        "max_length": ([0, 1], [-1, 0.5, True]), "lengths": LENGTHS}),
    (filters.stale, {"versions": [0], "current": 3, "max_lag": 0}, {
        "current": STEPS, "max_lag": STEPS, "versions": ([[0], [3]], [[-1], [4]])}),
    (filters.difficulty_band, {"rewards": [[0.5, 0.5]], "high": 0.5}, {"low": ([0.5], [0.5000001, NAN])}),
    (filters.zero_variance, {"rewards": [[0.0, 1.0]]}, {"threshold": ([0.0, 0], [DOWN, INF])}),
    (filters.dynamic_sampling, {"rewards": [[0.0, 1.0]]}, {"needed": ([1], [0, 1.0])}),
    (metrics.pass_at_k, {"n": 3, "c": 1, "k": 2}, {
        "k": ([1, 3], [0, 1.0]), "n": ([2], [1, 3.5, True]), "c": ([0, 3], [-1, 4])}),
    (metrics.pass_at_k, {"n": [3], "c": [1], "k": 2}, {
        "n": ([[2]], [[1]]), "c": ([[0], [3]], [[-1], [4], [0.5], [1, 1]])}),
    (metrics.group_informativeness, {"rewards": [[0.0, 1.0]], "high": 0.5}, {"low": ([0.4, -3.0], [0.5, NAN])}),
    (metrics.token_lag, {"versions": [[0]]}, {"current": STEPS}),
    (metrics.clip_fraction, RATIOS, {"clip_low_threshold": ([0.0, 1.0], [DOWN, 1.1])}),
    (corrections.token_tis, RATIOS, {"clip_low_threshold": ([0.0, 1.0], [DOWN, 1.1])}),
    (corrections.clamp, RATIOS, {"bound": ([UP, 300.0], [0.0, 300.1])}),
    (corrections.divergence_rejection, RATIOS, {"threshold": NOT_NEGATIVE}),
    (corrections.top_entropy, {"entropy": [0.5, 1.0]}, {"fraction": ([UP, 1.0], [0.0, 1.0000001])}),
    (corrections.clip_b, SCORES, {"mu": ([0.0], [DOWN, INF])}),
    (corrections.clip_v, {**SCORES, **SUMS}, {
        "mu": ([0.0], [DOWN, INF]), "max_fraction": ([0.0, 1.0], [DOWN, 1.0000001]),
        "sum_p2_logp": ([[0.0, -BIG]], [[0.0, -2 * BIG]])}),
    (rewards.cosine_length, {"correct": [True], "lengths": [1], "max_length": 2}, {
        "max_length": ([1], [0, 1.5]), "lengths": LENGTHS}),
    (rewards.length_cost, {"lengths": [1], "max_length": 3}, {"max_length": ([1], [0]), "coef": NOT_NEGATIVE}),
    (rewards.overlong_penalty, {"lengths": [1], "max_length": 3, "buffer": 1}, {
        "buffer": ([1, 3], [0, 4]), "factor": NOT_NEGATIVE}),
    (rewards.repetition_penalty, {"tokens": [[1, 2]]}, {
        "ngram": ([1], [0]), "factor": NOT_NEGATIVE, "tokens": ([[[1, 2]], [[]]], [[[1, 2], 3], [], 3])}),
    (rewards.stop_properly, {"rewards": [1.0], "truncated": [True]}, {
        "coef": ([1.0, -BIG], [1.0000001, -2 * BIG]), "rewards": ([[BIG]], [[2 * BIG], [INF]])}),
    (rewards.whitening, {"rewards": [1.0, 2.0]}, {"eps": NOT_NEGATIVE, "ddof": ([0, 1], [-1, 2])}),
    (rewards.nonterminal_reward, {"rewards": [[1.0]], "finished": [True]}, {"value": FAR}),
    (rewards.nonterminal_override, {"rewards": [1.0], "finished": [True]}, {"value": FAR}),
    (rewards.affine, {"rewards": [1.0]}, {"scale": FAR, "bias": FAR}),
    (rewards.think_format, {"texts": ["a"]}, {"tags": ([("<", ">")], [("", ">"), ("<", 1), ("<",)])}),
    (schedules.constant, {"value": 1.0}, {"step": STEPS}),
    (schedules.linear, {"start": 1.0, "end": 0.0, "steps": 3}, {"step": STEPS}),
    (schedules.cosine, {"start": 1.0, "steps": 3}, {"step": STEPS}),
    (schedules.warmup, {"steps": 3}, {"step": STEPS}),
    (schedules.wsd, {"step": 0, "peak": 1.0, "steps": 9, "decay_steps": 3}, {
        "step": STEPS, "warmup_steps": ([0, 6], [-1, 0.5]), "decay_steps": ([0, 9], [-1, 10])}),
    (schedules.chord_schedule, {"step": 1, "warmup_steps": 2, "decay_steps": 3}, {
        "step": STEPS, "warmup_steps": STEPS, "decay_steps": STEPS, "valley": ([0.0, 0.9], [DOWN, 1.1]),
        "peak": ([1.0, 0.05], [1.1, DOWN])}),
]  # fmt: skip
DATA = {"lengths", "versions", "n", "c", "rewards", "tokens", "sum_p2_logp"}


ROWS = [(f, needed, name, *ends) for f, needed, table in (*CLASSES, *FUNCTIONS) for name, ends in table.items()]


@for_each(("function", "needed", "name", "allowed", "refused"), ROWS)
def test_ends(function, needed, name, allowed, refused):
    """Each end is inside, or outside, as the docstring says. Bad data are a DataError, bad settings a ConfigError."""
    error = DataError if function in (Sample, Datum) or name in DATA else ConfigError
    where = rf"{function.__name__}\.{name}" if isinstance(function, type) else name
    for value in allowed:
        function(**{**needed, name: value})
    for value in refused:
        with pytest.raises(error, match=rf"^{where}\b"):
            function(**{**needed, name: value})


def test_every_field_has_its_ends_tested():
    """A field that is added has a range, too."""
    for kind, _, ends in CLASSES:
        assert {field.name for field in attrs.fields(kind)} == ends.keys(), kind


RESHAPING = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5}


@for_each(("name", "value"), [("top_k", 5), *RESHAPING.items()])
def test_options_that_reshape_are_told_like_top_p(name, value):
    """min_p and the penalties stand in the sample, keyword-only, and make a datum that losses with a ratio refuse."""
    sample = Sample([1], [2], [-1.0], **{name: value})
    assert sample.reshapes
    assert sample.sampling_options == SamplingParams(**{name: value}).sampling_options
    assert sample.datum(1.0).truncated
    assert not sample.datum(1.0, sampling_logprobs=[-1.0]).truncated
    assert not attrs.evolve(sample, temperature=0.0).datum(1.0).truncated  # its temperature says it all
    assert not SamplingParams(temperature=0.0, **{name: value}).truncates
    prepared = rlkit.losses.prepare("ppo")
    with pytest.raises(DataError, match="a penalty, so its sampling_logprobs are not the policy's"):
        prepared.check([sample.datum(1.0)])


def test_versions_of_tokens():
    mixed = Sample([5], [6, 7, 8], [-1.0] * 3, versions=[4, 5, 5])
    assert (mixed.version, mixed.versions.tolist()) == (4, [4, 5, 5])
    assert mixed.datum(1.0).inputs["versions"].tolist() == [0, 4, 5, 5]
    assert mixed.datum(1.0).inputs["versions"].dtype == np.int64
    same = Sample([5], [6, 7], [-1.0] * 2, versions=[4, 4])
    assert (same.version, same.versions, same.token_versions.tolist()) == (4, None, [4, 4])
    assert "versions" not in same.datum(1.0).inputs
    assert Sample([5], [], [], version=2, versions=[]).version == 2
    assert pickle.loads(pickle.dumps(mixed)).versions.tolist() == [4, 5, 5]
    for wrong in ([4], [4, 5, -1], [4.5, 5, 5], "abc"):
        with pytest.raises(DataError, match="versions"):
            Sample([5], [6, 7, 8], [-1.0] * 3, versions=wrong)
    with pytest.raises(DataError, match=r"Sample\.version: is 5; expected 4"):
        Sample([5], [6, 7], [-1.0] * 2, version=5, versions=[4, 5])
