"""Datum, Sample and the settings: what they hold, and what they refuse."""

from __future__ import annotations

import copy
import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit import Adam, ConfigError, DataError, Datum, Lora, Sample, SamplingParams
from tests.each import for_each
from tests.properties import examples

NAN, INF = float("nan"), float("inf")
T, M = [5, 6, 7, 8], [0, 0, 1, 1]


def test_defaults_are_pinned():
    """Default numbers are part of the API."""
    assert attrs.asdict(SamplingParams()) == {
        "max_tokens": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop": None,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    assert attrs.asdict(Adam()) == {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    assert attrs.asdict(Lora()) == {
        "rank": 32,
        "alpha": 32.0,
        "seed": None,
        "train_mlp": True,
        "train_attn": True,
        "train_unembed": None,
        "target_modules": None,
    }


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
    for prompt, completion in (([], [1]), ([1], [])):
        with pytest.raises(DataError, match="at least 1"):
            Datum.supervised(prompt, completion)


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
    with pytest.raises(DataError, match="both"):
        sample.datum(1.0, advantages=[1.0, 1.0])


BAD = [
    (lambda: Datum(T, M, temperature=1e-300), DataError, "temperature"),
    (lambda: Datum(T, M, temperature=1e300), DataError, "temperature"),
    (lambda: Datum(T, M, {"target_tokens": np.zeros((2, 0), int)}), DataError, "target_tokens"),
    (lambda: Sample([1], [2], [-1.0], top_k=0), DataError, "top_k"),
    (lambda: Sample([1], [2], [-1.0]).datum(1.0, temperature=2.0), DataError, "temperature"),
    (lambda: SamplingParams(temperature=1e-300), ConfigError, "temperature"),
    (lambda: rlkit.connect("toy", resume_from=""), ConfigError, "resume_from"),
    (lambda: rlkit.connect("toy", resume_from=False), ConfigError, "resume_from"),
    (lambda: rlkit.connect("toy", folder=3), ConfigError, "folder"),
    (lambda: rlkit.connect("toy", lora=3), ConfigError, "lora"),
    (lambda: rlkit.connect("toy", model=3), ConfigError, "model"),
    (lambda: Datum(None, M), DataError, "Datum.tokens"),
    (lambda: Datum("text", M), DataError, "encode"),
    (lambda: Datum([1], [0]), DataError, "at least 2"),
    (lambda: Datum([], []), DataError, "Datum.tokens"),
    (lambda: Datum([1.0, 2.0], [0, 1]), DataError, "integers"),
    (lambda: Datum([True, False], [0, 1]), DataError, "Datum.tokens"),
    (lambda: Datum([1, -2, 3], [0, 1, 1]), DataError, r"tokens\[1\]"),
    (lambda: Datum([1, None, 3], [0, 1, 1]), DataError, "Datum.tokens"),
    (lambda: Datum([[1, 2], [3, 4]], [0, 1]), DataError, "Datum.tokens"),
    (lambda: Datum([[1, 2], [3]], [0, 1]), DataError, "Datum.tokens"),
    (lambda: Datum(T, [0, 1]), DataError, "Datum.mask"),
    (lambda: Datum(T, None), DataError, "Datum.mask"),
    (lambda: Datum(T, [1, 0, 1, 1]), DataError, r"mask\[0\]"),
    (lambda: Datum(T, [0, 0, 2, 1]), DataError, r"mask\[2\]"),
    (lambda: Datum(T, [0, 0, NAN, 1]), DataError, r"mask\[2\]"),
    (lambda: Datum(T, M, None), DataError, "Datum.inputs"),
    (lambda: Datum(T, M, {"a b": 1.0}), DataError, "a b"),
    (lambda: Datum(T, M, {1: 1.0}), DataError, "Datum.inputs"),
    (lambda: Datum(T, M, {"a": [1.0, 2.0, 3.0]}), DataError, r"\(3,\)"),
    (lambda: Datum(T, M, {"a": [0, 0, NAN, 1]}), DataError, r"inputs\['a'\]\[2\]"),
    (lambda: Datum(T, M, {"a": [1.0, INF]}), DataError, r"inputs\['a'\]\[3\]"),
    (lambda: Datum(T, M, {"a": [1e300, 1.0]}), DataError, r"\[2\]"),
    (lambda: Datum(T, M, {"a": NAN}), DataError, "'a'"),
    (lambda: Datum(T, M, {"a": None}), DataError, "'a'"),
    (lambda: Datum(T, M, {"a": [True, False]}), DataError, "booleans"),
    (lambda: Datum(T, M, {"a": "text"}), DataError, "'a'"),
    (lambda: Datum(T, M, {"a": [[1.0], [2.0, 3.0]]}), DataError, "'a'"),
    (lambda: Datum(T, M, {"a": np.zeros((2, 2, 2))}), DataError, "'a'"),
    (lambda: Datum(T, M, temperature=-1.0), DataError, "temperature"),
    (lambda: Datum(T, M, temperature=NAN), DataError, "temperature"),
    (lambda: Datum(T, M, truncated=1), DataError, "truncated"),
    (lambda: Datum(T, M).select([1, 2]), DataError, "select"),
    (lambda: Datum(T, M).expand([1, 2, 3]), DataError, "expand"),
    (lambda: Sample([], [1], [-1.0]), DataError, "Sample.prompt"),
    (lambda: Sample([1], [2], [-1.0, -2.0]), DataError, "Sample.logprobs"),
    (lambda: Sample([1], [2], [NAN]), DataError, r"logprobs\[0\]"),
    (lambda: Sample([1], [2], [-INF]), DataError, r"logprobs\[0\]"),
    (lambda: Sample([1], [2], [-1.0], "cut"), DataError, "stop_reason"),
    (lambda: Sample([1], [2], [-1.0], version=-1), DataError, "version"),
    (lambda: Sample([1], [2], [-1.0], top_p=0.0), DataError, "top_p"),
    (lambda: Sample([1], [2], [-1.0], min_p=-0.1), DataError, "Sample.min_p"),
    (lambda: Sample([1], [2], [-1.0], presence_penalty=3.0), DataError, "Sample.presence_penalty"),
    (lambda: SamplingParams(min_p=1.1), ConfigError, "min_p"),
    (lambda: SamplingParams(min_p=NAN), ConfigError, "min_p"),
    (lambda: SamplingParams(repetition_penalty=0.0), ConfigError, "repetition_penalty"),
    (lambda: SamplingParams(repetition_penalty=-1.0), ConfigError, "repetition_penalty"),
    (lambda: SamplingParams(presence_penalty=2.1), ConfigError, "presence_penalty"),
    (lambda: SamplingParams(frequency_penalty="0.1"), ConfigError, "frequency_penalty"),
    (lambda: SamplingParams(max_tokens=0), ConfigError, "max_tokens"),
    (lambda: SamplingParams(max_tokens=True), ConfigError, "max_tokens"),
    (lambda: SamplingParams(max_tokens=2.0), ConfigError, "max_tokens"),
    (lambda: SamplingParams(max_tokens=None), ConfigError, "max_tokens"),
    (lambda: SamplingParams(temperature=-0.1), ConfigError, "temperature"),
    (lambda: SamplingParams(temperature=NAN), ConfigError, "temperature"),
    (lambda: SamplingParams(temperature="1"), ConfigError, "temperature"),
    (lambda: SamplingParams(top_p=0.0), ConfigError, "top_p"),
    (lambda: SamplingParams(top_p=1.1), ConfigError, "top_p"),
    (lambda: SamplingParams(top_k=0), ConfigError, "top_k"),
    (lambda: SamplingParams(top_k=-2), ConfigError, "top_k"),
    (lambda: SamplingParams(top_k=True), ConfigError, "top_k"),
    (lambda: SamplingParams(stop="x"), ConfigError, "tuple"),
    (lambda: SamplingParams(stop=3), ConfigError, "stop"),
    (lambda: SamplingParams(stop=("",)), ConfigError, r"stop\[0\]"),
    (lambda: SamplingParams(stop=("a", 1)), ConfigError, r"stop\[0\]"),
    (lambda: SamplingParams(stop=(1, "a")), ConfigError, r"stop\[1\]"),
    (lambda: SamplingParams(stop=(1, -1)), ConfigError, r"stop\[1\]"),
    (lambda: SamplingParams(stop=(True,)), ConfigError, r"stop\[0\]"),
    (lambda: Adam(learning_rate=NAN), ConfigError, "learning_rate"),
    (lambda: Adam(learning_rate=INF), ConfigError, "learning_rate"),
    (lambda: Adam(learning_rate=-1e-4), ConfigError, "learning_rate"),
    (lambda: Adam(learning_rate=None), ConfigError, "learning_rate"),
    (lambda: Adam(beta1=1.0), ConfigError, "beta1"),
    (lambda: Adam(beta2=-0.1), ConfigError, "beta2"),
    (lambda: Adam(eps=0.0), ConfigError, "eps"),
    (lambda: Adam(weight_decay=-1), ConfigError, "weight_decay"),
    (lambda: Adam(grad_clip_norm=INF), ConfigError, "grad_clip_norm"),
    (lambda: Lora(rank=0), ConfigError, "rank"),
    (lambda: Lora(rank=8.0), ConfigError, "rank"),
    (lambda: Lora(alpha=0), ConfigError, "alpha"),
    (lambda: Lora(seed=-1), ConfigError, "seed"),
    (lambda: Lora(train_mlp=1), ConfigError, "train_mlp"),
    (lambda: Lora(train_mlp=False, train_attn=False, train_unembed=False), ConfigError, "nothing"),
    (lambda: Lora(target_modules="q_proj"), ConfigError, "target_modules"),
    (lambda: Lora(target_modules=()), ConfigError, "target_modules"),
]


@for_each(("call", "error", "match"), BAD)
def test_bad_values_are_named(call, error, match):
    """Every class refuses what is out of range with an error that names the field and the index."""
    with pytest.raises(error, match=match) as caught:
        call()
    assert isinstance(caught.value, rlkit.RlkitError)
    assert isinstance(caught.value, ValueError)


def test_greedy_is_not_truncated():
    """top_k means nothing to a greedy sample, in its datum as in its settings."""
    assert not Sample([1], [2], [-1.0], temperature=0.0, top_k=5).datum(1.0).truncated
    assert not SamplingParams(temperature=0.0, top_k=5).truncates


OPTIONS = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5}


@pytest.mark.parametrize(("name", "value"), OPTIONS.items())
def test_options_that_reshape_are_told_like_top_p(name, value):
    """min_p and the penalties stand in the sample, keyword-only, and make a datum that losses with a ratio refuse."""
    sample = Sample([1], [2], [-1.0], **{name: value})
    assert sample.reshapes
    assert sample.sampling_options == SamplingParams(**{name: value}).sampling_options
    assert sample.datum(1.0).truncated
    assert not sample.datum(1.0, sampling_logprobs=[-1.0]).truncated
    assert not attrs.evolve(sample, temperature=0.0).datum(1.0).truncated  # its temperature says it all
    prepared = rlkit.losses.prepare("ppo")
    with pytest.raises(DataError, match="a penalty, so its sampling_logprobs are not the policy's"):
        prepared.check([sample.datum(1.0)])
    for cls in (Sample, SamplingParams):
        with pytest.raises(TypeError, match="positional"):
            cls(*range(12))


@pytest.mark.parametrize("thing", [SamplingParams(temperature=0.5), Sample([1], [2], [-1.0], "length", top_k=3)])
def test_pickles_have_every_field(thing):
    new = pickle.loads(pickle.dumps(attrs.evolve(thing, **OPTIONS)))
    assert {name: getattr(new, name) for name in OPTIONS} == OPTIONS


def test_unknown_fields_are_refused():
    """A misspelt setting is a TypeError at once."""
    for cls in (SamplingParams, Adam, Lora):
        with pytest.raises(TypeError, match="max_token_count"):
            cls(max_token_count=1)


def test_top_k_must_be_an_integer():
    """-1.0 is no way to say off."""
    with pytest.raises(ConfigError, match="top_k"):
        SamplingParams(top_k=-1.0)


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
