"""``prepare``: what stands between a loss and a backend."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

import rlkit
from rlkit import BackendError, ConfigError, DataError, UnknownNameError
from rlkit.advantages import token_weights
from rlkit.losses import loss, prepare, registry, with_entropy, with_kl
from tests.each import for_each
from tests.losses.calls import BATCHES, COMPOSED, NAMES, PAIRS, call, datums, example, tensors

ALL = {**{name: name for name in NAMES}, **COMPOSED}


def gradient(prepared, driver, inputs):
    """`prepared.gradient` of made-up arrays."""
    data, leaves = datums(driver, inputs)
    prepared.check(data)
    entropy = tensors(inputs["entropy"], torch.float32) if "entropy" in inputs else None
    return prepared.gradient(leaves, data, entropy=entropy)


def close(a, b, tolerance=1e-5):
    assert a.value == pytest.approx(b.value, rel=tolerance, abs=tolerance)
    for x, y in zip([*a.driver, *(a.entropy or [])], [*b.driver, *(b.entropy or [])], strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@for_each("title", ALL)
def test_agrees_with_a_direct_call(title):
    """What a backend is given is the loss itself, called per datum, pair or batch; datums without tokens are 0."""
    driver, inputs = example(ALL[title], np.random.default_rng(4))
    value, gradients, entropies = call(ALL[title], driver, inputs)
    found = gradient(prepare(ALL[title]), driver, inputs)
    assert found.value == pytest.approx(value, rel=1e-4, abs=1e-5)
    for x, y in zip([*found.driver, *(found.entropy or [])], [*gradients, *entropies], strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-3, atol=1e-5)


@for_each("title", ALL)
def test_token_mean_is_a_plain_mean(title):
    """Weights of 1 / N make the loss a mean over tokens, KL and entropy terms included: the sum over N."""
    driver, inputs = example(ALL[title], np.random.default_rng(6), optional=())
    lengths = [len(x) for x in driver]
    plain = call(ALL[title], driver, inputs)
    weights = token_weights(lengths, "token-mean")
    mean = call(ALL[title], driver, {**inputs, "weights": list(weights)})
    assert mean[0] == pytest.approx(plain[0] / sum(lengths))
    for x, y in zip([*mean[1], *mean[2]], [*plain[1], *plain[2]], strict=True):
        np.testing.assert_allclose(x, y / sum(lengths), rtol=1e-9)
    per_token = call(
        ALL[title], driver, {**inputs, "weights": [np.full(n, w) for n, w in zip(lengths, weights, strict=True)]}
    )
    assert per_token[0] == pytest.approx(mean[0])


@for_each("title", [title for title in ALL if prepare(ALL[title]).level == "datum"])
def test_sequence_means_are_plain_means(title):
    """With "seq-mean-token-mean" the loss is the mean over sequences of each one's loss over its length."""
    driver, inputs = example(ALL[title], np.random.default_rng(7), optional=())
    lengths = [len(x) for x in driver]
    alone = [call(ALL[title], driver[i : i + 1], {k: v[i : i + 1] for k, v in inputs.items()})[0] for i in range(4)]
    expected = np.mean([value / n for value, n in zip(alone, lengths, strict=True)])
    weights = list(token_weights(lengths, "seq-mean-token-mean"))
    assert call(ALL[title], driver, {**inputs, "weights": weights})[0] == pytest.approx(expected)


@for_each("title", [title for title in ALL if title not in (*BATCHES, "kl_cov+abs", "kl_cov+entropy")])
def test_micro_batches(title):
    """Gradients of parts are parts of the gradient, and values add up."""
    prepared = prepare(ALL[title])
    driver, inputs = example(ALL[title], np.random.default_rng(8))
    whole = gradient(prepared, driver, inputs)
    parts = [gradient(prepared, driver[i : i + 2], {k: v[i : i + 2] for k, v in inputs.items()}) for i in (0, 2)]
    assert whole.value == pytest.approx(sum(part.value for part in parts), rel=1e-4, abs=1e-5)
    for x, y in zip(whole.driver, [g for part in parts for g in part.driver], strict=True):
        torch.testing.assert_close(x, y)


FLAGGED = [t for t in ALL if prepare(ALL[t]).level == "datum" and prepare(ALL[t]).elementwise]
UNFLAGGED = [t for t in ALL if prepare(ALL[t]).level == "datum" and not prepare(ALL[t]).elementwise and t != "kto"]


def concatenated(title, driver, inputs):
    """One call on the tokens of all datums, numbers repeated for each token."""
    lengths = [len(x) for x in driver]
    flat = {
        name: [
            np.concatenate([np.broadcast_to(v, (n, *np.shape(v)[1:])) for v, n in zip(values, lengths, strict=True)])
        ]
        for name, values in inputs.items()
    }
    value, gradients, _ = call(ALL[title], [np.concatenate(driver)], flat)
    return value, np.split(gradients[0], np.cumsum(lengths)[:-1])


@for_each("title", FLAGGED)
def test_elementwise(title):
    """One call on the concatenated tokens is the sum of the calls per datum."""
    driver, inputs = example(ALL[title], np.random.default_rng(9))
    value, gradients, _ = call(ALL[title], driver, inputs)
    one, parts = concatenated(title, driver, inputs)
    assert one == pytest.approx(value)
    for x, y in zip(parts, gradients, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    prepared = prepare(ALL[title])
    close(gradient(prepared, driver, inputs), gradient(attrs.evolve(prepared, elementwise=False), driver, inputs))


@for_each("title", UNFLAGGED)
def test_not_elementwise(title):
    """Losses without the flag do look beyond the token: concatenated they are something else."""
    driver, inputs = example(ALL[title], np.random.default_rng(10))
    assert abs(concatenated(title, driver, inputs)[0] - call(ALL[title], driver, inputs)[0]) > 1e-4


def test_kto_is_not_elementwise():
    driver, inputs = example("kto", np.random.default_rng(10), optional=())
    inputs["desirable"] = [1.0] * 4
    both = {"reference_logprobs": [np.concatenate(inputs["reference_logprobs"])], "desirable": [1.0]}
    assert abs(call("kto", [np.concatenate(driver)], both)[0] - call("kto", driver, inputs)[0]) > 1e-4


@for_each("title", NAMES)
def test_missing_inputs_are_named(title):
    """Each input that is not there is named with the datum that lacks it."""
    prepared = prepare(title)
    driver, inputs = example(title, np.random.default_rng(0), sizes=(2, 3))
    needed = [*prepared.inputs, *(["target_tokens"] if prepared.driver == "target_logprobs" else [])]
    for name in needed:
        data, _ = datums(driver, {k: v for k, v in inputs.items() if k != name})
        with pytest.raises(DataError, match=rf"data\[0\].inputs lacks '{name}', which the loss '{title}'"):
            prepared.check(data)
        data, _ = datums(driver, inputs)
        part = attrs.evolve(data[1], inputs={k: v for k, v in data[1].inputs.items() if k != name})
        with pytest.raises(DataError, match=rf"data\[1\].inputs lacks '{name}'"):
            prepared.check([data[0], part])
    nothing = rlkit.Datum([1, 2], [0, 1])
    there = datums(driver, {"weights": [1.0, 1.0]})[0] if "weights" in prepared.optional else []
    if needed:
        for datum, names in ((nothing, "none"), *((d, "weights") for d in there)):
            with pytest.raises(DataError, match=f"it has: {names}$"):
                prepared.check([datum])


def test_settings_of_a_name_and_of_a_function():
    """``config`` binds settings; an unknown one lists those that there are."""
    for given in ("ppo", registry["ppo"]):
        assert prepare(given, {"dual_clip": 2.0}).settings["dual_clip"] == 2.0
        with pytest.raises(ConfigError, match=r"config\['clip'\].*clip_low_threshold, clip_high_threshold, dual_clip"):
            prepare(given, {"clip": 0.2})
    with pytest.raises(ConfigError, match="There are: none"):
        prepare("reinforce", {"beta": 1.0})
    with pytest.raises(UnknownNameError, match="did you mean 'cispo'"):
        prepare("cipso")


def test_inputs_are_no_settings():
    """``mu`` of a mixture is an input of the datum, so that it can change without the loss changing."""
    with pytest.raises(ConfigError, match=r"config\['mu'\]"):
        prepare("mix", {"mu": 0.2})
    driver, inputs = example("mix", np.random.default_rng(0), optional=())
    default = gradient(prepare("mix"), driver, inputs)
    close(default, gradient(prepare("mix"), driver, {**inputs, "mu": [0.1] * 4}))
    assert default.value != gradient(prepare("mix"), driver, {**inputs, "mu": [0.6] * 4}).value


def test_expert_datums_may_carry_numbers_for_what_is_not_used():
    """For an expert's datum zeros stand in for sampling_logprobs, [n], and advantages, () or [n]."""
    driver, _ = example("mix", np.random.default_rng(0), sizes=(3,), optional=())
    found = []
    for zero in (0.0, np.zeros(3)):
        data, leaves = datums(driver, {"expert": [1.0], "sampling_logprobs": [np.zeros(3)], "advantages": [zero]})
        prepare("mix").try_out(data)
        found.append(prepare("mix").gradient(leaves, data))
        np.testing.assert_allclose(found[-1].driver[0].numpy(), -0.1, rtol=1e-6)
    close(*found)


def test_weights_for_a_loss_that_has_none():
    """Weights that would do nothing are refused."""

    def plain(logprobs):
        return -logprobs.sum()

    data = [rlkit.Datum.supervised([1], [2, 3])]
    with pytest.raises(DataError, match=r"data\[0\].inputs has 'weights', which the loss 'plain' does not take"):
        prepare(plain).check(data)


def test_some_have_weights_and_some_have_not():
    """The default of the signature stands in for an input that some datums of a call lack."""
    for name in ("importance_sampling", "kl_cov", "gspo"):
        driver, inputs = example(name, np.random.default_rng(0), sizes=(2, 3))
        data, leaves = datums(driver, inputs)
        some = [data[0], attrs.evolve(data[1], inputs={k: v for k, v in data[1].inputs.items() if k != "weights"})]
        ones = [data[0], data[1].with_inputs(weights=1.0)]
        close(prepare(name).gradient(leaves, some), prepare(name).gradient(leaves, ones))


def test_behaviour_must_have_probabilities():
    """Greedy and truncated samples are refused by losses that form a ratio with sampling_logprobs, and only those."""
    driver, inputs = example("ppo", np.random.default_rng(0), sizes=(2,))
    (datum,), _ = datums(driver, inputs)
    with pytest.raises(DataError, match=r"data\[0\] was sampled greedily"):
        prepare("ppo").check([attrs.evolve(datum, temperature=0.0)])
    with pytest.raises(DataError, match=r"data\[0\] was sampled with top_p, top_k, min_p or a penalty"):
        prepare("ppo").check([attrs.evolve(datum, truncated=True)])
    for changed in ({"temperature": 0.0}, {"truncated": True}):
        for name in ("cross_entropy", "reinforce"):
            prepare(name).check([attrs.evolve(datum, **changed)])
        with pytest.raises(DataError, match="'with_kl\\(reinforce\\)'"):
            prepare(with_kl("reinforce", 0.1, "ratio_corrected")).check(
                [attrs.evolve(datum, **changed).with_inputs(reference_logprobs=driver[0])]
            )


@loss(elementwise=True)
def flagged(logprobs):
    """An elementwise loss with a metric per call."""
    return logprobs.sum(), {"size": logprobs.numel()}


def test_metrics():
    """A metric's name says how it combines; without a word on it it is a mean, which elementwise losses cannot give."""

    def measured(logprobs):
        n = logprobs.numel()
        return -logprobs.sum(), {"a:sum": 2.0, "b:mean": torch.tensor(0.5), "c": n, "d_max": n, "d:min": n}

    data = [rlkit.Datum(range(5), [0, 0, 1, 1, 1]), rlkit.Datum(range(3), [0, 0, 1]), rlkit.Datum(range(3), [0, 0, 0])]
    leaves = [torch.zeros(3), torch.zeros(1), torch.zeros(0)]
    found = prepare(measured).gradient(leaves, data)
    means = {"b:mean": 1.0, "c:mean": 4.0}  # still summed over datums
    assert dict(found.metrics) == {"a:sum": 4.0, **means, "d_max:max": 3.0, "d:min": 1.0}
    assert [x.shape for x in found.driver] == [(3,), (1,), (0,)]
    with pytest.raises(ConfigError, match="metric 'size:mean' of the elementwise loss 'flagged'.*':sum'"):
        prepare(flagged).gradient(leaves, data)


@pytest.mark.parametrize(("level", "expected"), [("pair", 2 * (3.0 + 5.0)), ("batch", 4 * 8.0)])
def test_means_over_several_datums(level, expected):
    """A mean that a call reports counts for each of its datums."""

    @loss(level=level)
    def measured(logprobs):
        return sum(part.sum() for part in logprobs), {"size": sum(part.numel() for part in logprobs)}

    data = [rlkit.Datum(range(n + 1), [0] + [1] * n) for n in (1, 2, 2, 3)]
    found = prepare(measured).gradient([torch.zeros(n) for n in (1, 2, 2, 3)], data)
    assert dict(found.metrics) == {"size:mean": expected}


@pytest.mark.parametrize("first", [True, False])
def test_an_input_without_default_is_there_for_all_or_none(first):
    """What a loss takes or leaves, and has no number for, cannot be missing from some datums only."""
    title = with_kl("cross_entropy", 0.1, "ratio_corrected")
    driver, inputs = example(title, np.random.default_rng(0), sizes=(2, 3), optional=("sampling_logprobs",))
    data, leaves = datums(driver, inputs)
    lacking = data[not first]
    data[not first] = attrs.evolve(lacking, inputs={"reference_logprobs": lacking.inputs["reference_logprobs"]})
    with pytest.raises(DataError, match="some datums lack the input 'sampling_logprobs' of the loss 'with_kl"):
        prepare(title).gradient(leaves, data)


def test_pairs():
    """An odd number of datums, and one of a pair without tokens, are refused."""
    driver, inputs = example("dpo", np.random.default_rng(0), sizes=(2, 3, 1))
    data, _ = datums(driver, inputs)
    with pytest.raises(DataError, match=r"3 datums; the loss 'dpo' takes \(chosen, rejected\) pairs"):
        prepare("dpo").check(data)
    empty = attrs.evolve(data[1], mask=np.zeros(len(data[1]), bool))
    with pytest.raises(DataError, match=r"data\[1\].mask is all False"):
        prepare("dpo").check([data[0], empty])


@pytest.mark.parametrize("name", ["ppo", "gspo", "kl_cov", "dpo"])
def test_gradient_that_is_not_finite(name):
    """A NaN among the logprobs, or an overflow, is a BackendError that names loss and datum."""
    driver, inputs = example(name, np.random.default_rng(0), sizes=(2, 2))
    driver[1] = np.array([-1.0, np.nan])
    with pytest.raises(BackendError, match=rf"the loss '{name}' has a non-finite gradient at data\[[01]\]"):
        gradient(prepare(name), driver, inputs)


def test_gradient_of_the_entropy_that_is_not_finite():
    """One entry is enough, in whichever datum."""

    def rooted(logprobs, entropy):
        return logprobs.sum() + entropy.sqrt().sum()

    data = [rlkit.Datum([1, 2, 3], [0, 1, 1]), rlkit.Datum([1, 2, 3], [0, 1, 1])]
    for entropies in ([[0.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 0.0]]):
        place = 0 if 0.0 in entropies[0] else 1
        with pytest.raises(BackendError, match=rf"the loss 'rooted' has a non-finite gradient at data\[{place}\]"):
            prepare(rooted).gradient([torch.zeros(2)] * 2, data, entropy=[torch.tensor(e) for e in entropies])


def test_value_that_is_not_finite():
    def endless(logprobs):
        return logprobs.sum() + float("inf")

    with pytest.raises(BackendError, match="the loss 'endless' is inf"):
        prepare(endless).gradient([torch.zeros(1)], [rlkit.Datum([1, 2], [0, 1])])


def test_datums_without_tokens():
    """They are not given to the loss and have a gradient of length 0; only they: nothing at all."""
    driver, inputs = example("gspo", np.random.default_rng(0), sizes=(2,))
    data, leaves = datums(driver, inputs)
    empty = attrs.evolve(data[0], mask=np.zeros(4, bool))
    close(
        attrs.evolve(prepare("gspo").gradient([leaves[0][:0], *leaves], [empty, *data]), driver=[]),
        attrs.evolve(prepare("gspo").gradient(leaves, data), driver=[]),
    )
    nothing = prepare("gspo").gradient([leaves[0][:0]], [empty])
    assert nothing.value == 0.0
    assert nothing.driver[0].shape == (0,)


def bad_signatures():
    def first(advantages, logprobs):
        return logprobs.sum()

    def many(logprobs, *others):
        return logprobs.sum()

    def named(logprobs, **others):
        return logprobs.sum()

    def unset(logprobs, *, beta):
        return beta * logprobs.sum()

    return [
        (first, "the first parameter of the loss 'first' must be one of"),
        (many, r"the loss 'many' takes \*others"),
        (named, r"the loss 'named' takes \*\*others"),
        (unset, "config lacks 'beta'"),
    ]


@pytest.mark.parametrize(("function", "message"), bad_signatures())
def test_signatures(function, message):
    """What cannot be a loss is refused before anything runs."""
    with pytest.raises(ConfigError, match=message):
        prepare(function)


def test_marks_are_checked():
    """A level that does not exist, a mark that is no bool, and an elementwise loss over several datums."""
    for bad, message in (
        ({"level": "token"}, r"^loss\(level\): got 'token'"),
        ({"elementwise": 1}, r"^loss\(elementwise\): got 1"),
        ({"level": "pair", "elementwise": True}, r"^loss\(elementwise=True\) needs level 'datum'; got 'pair'"),
    ):
        with pytest.raises(ConfigError, match=message):
            loss(**bad)


@pytest.mark.parametrize(("level", "sizes"), [("datum", [2]), ("pair", [2, 3]), ("batch", [2, 3, 1, 1])])
def test_trying_out_takes_as_few_datums_as_the_level_needs(level, sizes):
    """A loss is tried out by one call, on one datum or one pair where that is all that it looks at."""
    calls = []

    @loss(level=level)
    def counted(logprobs):
        parts = [logprobs] if level == "datum" else logprobs
        calls.append([part.shape[0] for part in parts])
        return sum(part.sum() for part in parts)

    data = [rlkit.Datum(range(n + 1), [0] + [1] * n) for n in (2, 3, 1, 1)]
    prepare(counted).try_out(data)
    assert calls == [sizes]


@pytest.mark.parametrize(
    ("marks", "sizes"),
    [
        ({"elementwise": True}, [[6]]),
        ({}, [[2], [3], [1]]),
        ({"level": "pair"}, [[2, 3], [1, 2]]),
        ({"level": "batch"}, [[2, 3, 1]]),
    ],
)
def test_calls_by_level(marks, sizes):
    """One call for all tokens, for each datum, for each pair or for the batch; none for datums without tokens."""
    calls = []

    @loss(**marks)
    def counted(logprobs):
        parts = [logprobs] if isinstance(logprobs, torch.Tensor) else logprobs
        assert type(logprobs) is {"pair": tuple, "batch": list}.get(marks.get("level"), torch.Tensor)
        calls.append([part.shape[0] for part in parts])
        return sum(part.sum() for part in parts)

    lengths = [2, 3, 1, 2] if "pair" in marks.values() else [2, 0, 3, 1]
    data = [rlkit.Datum(range(n + 2), [0, 0] + [1] * n) for n in lengths]
    found = prepare(counted).gradient([torch.zeros(n) for n in lengths], data)
    assert calls == sizes
    assert [g.tolist() for g in found.driver] == [[1.0] * n for n in lengths]


@pytest.mark.parametrize("name", ["topk_forward_kl", "topk_reverse_kl", "topk_jsd"])
def test_different_numbers_of_targets(name):
    """Datums of one batch may have different numbers of targets at each position."""
    s, t = full(0), full(1)
    wide = {"teacher_logprobs": [t], "target_tokens": [np.arange(18).reshape(3, 6)]}
    narrow = {"teacher_logprobs": [t[:, :2]], "target_tokens": [np.arange(6).reshape(3, 2)]}
    both = gradient(prepare(name), [s, s[:, :2]], {k: [*wide[k], *narrow[k]] for k in wide})
    parts = gradient(prepare(name), [s], wide), gradient(prepare(name), [s[:, :2]], narrow)
    assert both.value == pytest.approx(sum(part.value for part in parts), rel=1e-5)
    for x, y in zip(both.driver, [g for part in parts for g in part.driver], strict=True):
        torch.testing.assert_close(x, y)


def test_datums_that_a_loss_does_not_look_at():
    """A batch loss that leaves a datum out gives it a gradient of 0."""

    @loss(level="batch")
    def first_only(logprobs):
        return logprobs[0].sum()

    data = [rlkit.Datum([1, 2, 3], [0, 1, 1]), rlkit.Datum([1, 2], [0, 1])]
    found = prepare(first_only).gradient([torch.zeros(2), torch.zeros(1)], data)
    assert [g.tolist() for g in found.driver] == [[1.0, 1.0], [0.0]]


def test_losses_that_return_something_else():
    """A vector, a number, or what does not depend on the logprobs, is refused when it is tried out."""
    data = [rlkit.Datum([1, 2, 3], [0, 1, 1])]
    for function, message in (
        (lambda logprobs: logprobs, r"returned a tensor of shape \(2,\)"),
        (lambda logprobs: 1.0, "returned 1.0"),
        (lambda logprobs: (logprobs.sum(), 3), "returned metrics 3"),
        (lambda logprobs: (logprobs.sum(), {"loss:sum": 1.0}), "returned the metric 'loss:sum'"),
        (lambda logprobs: (logprobs.sum(), {3: 1.0}), "returned the metric 3"),
        (lambda logprobs: logprobs.detach().sum(), "does not depend on logprobs"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(function).try_out(data)


def test_composed_losses_have_the_inputs_and_settings_of_both():
    """Needed inputs, optional ones and settings of the loss and of the term; names that meet are one."""
    prepared = prepare(with_kl("ppo", 0.2, "clamped"), {"kl_coef": 0.5, "dual_clip": 2.0, "value_bound": 3.0})
    assert prepared.name == "with_kl(ppo)"
    assert prepared.inputs == ("sampling_logprobs", "advantages", "reference_logprobs")
    assert dict(prepared.optional) == {"weights": 1.0}
    assert prepared.settings["kl_coef"] == 0.5
    assert prepared.settings["dual_clip"] == 2.0
    assert prepared.settings["value_bound"] == 3.0
    assert prepare(with_kl("dpo")).inputs == ("reference_logprobs",)
    corrected = prepare(with_kl("cross_entropy", 0.1, "ratio_corrected"))
    assert corrected.inputs == ("reference_logprobs",)
    assert dict(corrected.optional) == {"weights": 1.0, "sampling_logprobs": None}
    assert prepare(with_kl("ppo", 0.1, "ratio_corrected")).inputs == prepared.inputs
    assert prepare(with_kl("ppo", "beta_now")).inputs[-1] == "beta_now"
    assert "kl_coef" not in prepare(with_kl("ppo", "beta_now")).settings
    nested = prepare(with_entropy(with_kl("gspo")))
    assert nested.name == "with_entropy(with_kl(gspo))"
    assert nested.entropy
    assert (nested.level, nested.elementwise) == ("datum", False)
    assert {"kl_coef", "entropy_coef", "clip_low_threshold"} == {*nested.settings} - {"clip_high_threshold"}
    assert prepare(with_kl("ppo")).elementwise
    assert prepare(with_kl("simpo")).level == "pair"
    assert prepare(with_kl("kl_cov")).level == "batch"
    assert with_kl("ppo").__doc__.startswith("-sum w min(r A")


def test_composed_settings_take_effect():
    """The coefficient by config, by the factory, and by an input is one and the same."""
    driver, inputs = example(with_kl("ppo", "c"), np.random.default_rng(0), optional=("weights",))
    inputs = {k: v for k, v in inputs.items() if k != "c"}
    by_factory = gradient(prepare(with_kl("ppo", 0.7)), driver, inputs)
    close(by_factory, gradient(prepare(with_kl("ppo"), {"kl_coef": 0.7}), driver, inputs))
    close(by_factory, gradient(prepare(with_kl("ppo", "c")), driver, {**inputs, "c": [0.7] * 4}))
    tight = gradient(prepare(with_kl("ppo", 0.0), {"clip_high_threshold": 1.01}), driver, inputs)
    without = {k: v for k, v in inputs.items() if k != "reference_logprobs"}
    close(tight, gradient(prepare("ppo", {"clip_high_threshold": 1.01}), driver, without))


def test_composed_loss_keeps_metrics():
    """Metrics of the loss inside pass through."""

    def measured(logprobs, advantages):
        return -(advantages * logprobs).sum(), {"size:sum": logprobs.numel()}

    driver, inputs = example(with_kl(measured), np.random.default_rng(0), optional=())
    found = gradient(prepare(with_kl(measured, 0.5)), driver, inputs)
    assert found.metrics == {"size:sum": 15.0}
    plain = {"advantages": inputs["advantages"], "reference_logprobs": inputs["reference_logprobs"]}
    assert found.value == pytest.approx(call(with_kl("reinforce", 0.5), driver, plain)[0], rel=1e-5)


def test_loss_without_weights_stays_without():
    """A loss that takes no weights has none when composed, so that weights are still refused."""

    def plain(logprobs):
        return -logprobs.sum()

    assert not prepare(with_entropy(plain)).optional


def test_pairs_without_weights():
    """A term that is added to a loss of pairs without weights counts once per token."""

    @loss(level="pair")
    def margin(logprobs):
        return logprobs[1].sum() - logprobs[0].sum()

    driver, inputs = example(with_kl("simpo"), np.random.default_rng(0), sizes=(2, 3), optional=())
    plain = driver[1].sum() - driver[0].sum()
    squares = sum(((a - b) ** 2).sum() for a, b in zip(driver, inputs["reference_logprobs"], strict=True))
    assert call(with_kl(margin, 0.5, "k2"), driver, inputs)[0] == pytest.approx(plain + 0.25 * squares)


def test_optional_inputs_come_before_settings():
    """What a term can do without stands between the inputs and the settings of the loss."""
    prepared = prepare(with_kl("opmd", 0.1, "ratio_corrected"))
    assert dict(prepared.optional) == {"weights": 1.0, "sampling_logprobs": None}
    assert dict(prepared.settings) == {"tau": 1.0, "kl_coef": 0.1}


def loose(logprobs, weights=1.0, reference_logprobs=-1.0, sampling_logprobs=-1.0):
    """A loss that can do without a reference."""
    return -(weights * (logprobs - reference_logprobs) * (logprobs - sampling_logprobs)).sum()


def test_what_one_needs_and_the_other_does_not():
    """An input that the term needs is needed; one that both can do without keeps the loss's default."""
    prepared = prepare(with_kl(loose, 0.1, "ratio_corrected"))
    assert prepared.inputs == ("reference_logprobs",)
    assert dict(prepared.optional) == {"weights": 1.0, "sampling_logprobs": -1.0}


def with_clash(logprobs, *, kl_coef=1.0):
    return kl_coef * logprobs.sum()


def no_names(logprobs, *rest):
    return logprobs.sum()


@for_each(
    ("make", "error", "message"),
    [
        (lambda: with_kl("ppo", -0.1), ConfigError, "^kl_coef"),
        (lambda: with_kl("ppo", float("nan")), ConfigError, "^kl_coef"),
        (lambda: with_kl("ppo", "not a name"), ConfigError, "^coef"),
        (lambda: with_kl("ppo", "clip_low_threshold"), ConfigError, "already has a parameter 'clip_low_threshold'"),
        (lambda: with_kl(with_clash), ConfigError, "already has a parameter 'kl_coef'"),
        (lambda: with_kl(with_kl("ppo")), ConfigError, "already has a parameter 'kl_coef'"),
        (lambda: with_kl("value_huber"), ConfigError, "driven by 'values'"),
        (lambda: with_kl(no_names), ConfigError, "one by one"),
        (lambda: with_kl("pppo"), UnknownNameError, "no loss named"),
        (lambda: with_entropy("ppo", float("inf")), ConfigError, "^entropy_coef"),
        (lambda: with_entropy("ppo", None), ConfigError, "^entropy_coef"),
    ],
)
def test_compositions_that_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_coefficients_are_checked_when_called():
    """A coefficient that comes by config is checked too; a negative one of the entropy is allowed."""
    driver, inputs = example(with_kl("ppo"), np.random.default_rng(0))
    with pytest.raises(ConfigError, match="^kl_coef"):
        gradient(prepare(with_kl("ppo"), {"kl_coef": -1.0}), driver, inputs)
    driver, inputs = example(with_entropy("ppo"), np.random.default_rng(0))
    gradient(prepare(with_entropy("ppo"), {"entropy_coef": -1.0}), driver, inputs)


def test_entropy_must_be_given():
    driver, inputs = example(with_entropy("ppo"), np.random.default_rng(0))
    data, leaves = datums(driver, inputs)
    with pytest.raises(ConfigError, match="names entropy, but none was given"):
        prepare(with_entropy("ppo")).gradient(leaves, data)


def full(seed, n=3, v=6):
    return np.log(np.random.default_rng(seed).dirichlet(np.ones(v), n))


def test_topk_over_the_whole_vocabulary():
    """They are the divergences themselves: not negative, 0 where both agree, the Jensen-Shannon one symmetric."""
    s, t = full(0), full(1)
    kl = (np.exp(t) * (t - s)).sum(), (np.exp(s) * (s - t)).sum()
    value = {n: call(n, [s], {"teacher_logprobs": [t]})[0] for n in ("topk_forward_kl", "topk_reverse_kl", "topk_jsd")}
    assert (value["topk_forward_kl"], value["topk_reverse_kl"]) == pytest.approx(kl)
    assert call("topk_jsd", [t], {"teacher_logprobs": [s]})[0] == pytest.approx(value["topk_jsd"])
    assert 0 < value["topk_jsd"] < 3 * np.log(2)
    for name in value:
        assert call(name, [s], {"teacher_logprobs": [s]})[0] == pytest.approx(0, abs=1e-12)
    near = {beta: call("topk_jsd", [s], {"teacher_logprobs": [t]}, {"beta": beta})[0] / beta for beta in (1e-6,)}
    assert near[1e-6] == pytest.approx(kl[0], rel=1e-4)  # beta to 0: JSD / beta is KL(teacher || model)


@pytest.mark.parametrize("name", ["topk_forward_kl", "topk_reverse_kl", "topk_jsd"])
def test_no_token_no_loss(name):
    """Entries with target -1 add exactly nothing, whatever stands there, and have no gradient."""
    s, t = full(0), full(1)
    targets = np.arange(18).reshape(3, 6)
    targets[:, 4:] = -1
    inputs = {"teacher_logprobs": [t[:, :4]], "target_tokens": [targets[:, :4]]}
    short = call(name, [s[:, :4]], inputs)
    for junk in (0.0, -50.0, np.nan, -np.inf):
        s[:, 4:], t[:, 4:] = junk, junk if np.isnan(junk) else -1.0
        value, (gradients,), _ = call(name, [s], {"teacher_logprobs": [t], "target_tokens": [targets]})
        assert value == pytest.approx(short[0], rel=1e-12)
        np.testing.assert_array_equal(gradients[:, :4], short[1][0])
        assert not gradients[:, 4:].any()


@pytest.mark.parametrize("title", [title for title in ALL if not title.startswith("value")])
def test_on_a_backend(title):
    """The toy backend runs every loss: the value is that at its own logprobs, and its gradient can be stepped."""
    driver, inputs = example(ALL[title], np.random.default_rng(3), sizes=(4, 2, 3, 1))
    if prepare(ALL[title]).driver == "target_logprobs":
        driver = [np.zeros(len(x)) for x in driver]
    data, _ = datums(driver, {k: v for k, v in inputs.items() if k != "entropy"})
    with rlkit.connect("toy", seed=0) as policy:
        output = policy.forward_backward(data, ALL[title], want=("entropy",)).result()
        inputs["entropy"] = [d.select(e) for d, e in zip(data, output.outputs["entropy"], strict=True)]
        if prepare(ALL[title]).driver == "logprobs":
            given = {k: v for k, v in inputs.items() if k != "entropy" or prepare(ALL[title]).entropy}
            expected = call(ALL[title], [d.select(lp) for d, lp in zip(data, output.logprobs, strict=True)], given)[0]
            assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert np.isfinite(output.metrics["loss:sum"])
        policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()


def test_topk_loss_on_a_backend():
    """The toy backend gives the logprobs of the targets, and its gradient moves the model towards the teacher."""
    with rlkit.connect("toy", seed=0) as policy:
        rng = np.random.default_rng(0)
        targets = rng.integers(0, 100, (3, 4))
        targets[1, 2] = -1
        teacher = np.log(rng.dirichlet(np.ones(4), 3))
        datum = rlkit.Datum([65, 66, 67, 68], [0, 1, 1, 1], {"target_tokens": targets, "teacher_logprobs": teacher})
        values = []
        for _ in range(5):
            values.append(policy.forward_backward([datum], "topk_forward_kl").result().metrics["loss:sum"])
            policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.9 * values[0]


def test_exact_entropy_on_a_backend():
    """A loss that is nothing but an entropy bonus raises the entropy of the policy's distribution."""
    with rlkit.connect("toy", seed=0) as policy:
        datum = rlkit.Datum([65, 66, 67, 68], [0, 1, 1, 1], {"advantages": [0.0, 0.0, 0.0]})
        bonus = with_entropy("reinforce", 1.0)
        values = []
        for _ in range(5):
            values.append(policy.forward_backward([datum], bonus).result().metrics["loss:sum"])
            policy.optim_step(rlkit.Adam(learning_rate=0.02)).result()
    assert values == sorted(values, reverse=True)
    assert values[0] < 0


def test_pair_names():
    """The list of pair losses that these tests use is the registry's."""
    assert {name for name in NAMES if prepare(name).level == "pair"} == set(PAIRS)


@pytest.mark.parametrize("name", ["logprobs", "weights", "advantages", "reference_logprobs"])
def test_coefficient_inputs_have_names_of_their_own(name):
    """A coefficient named after another input would silently be that input."""
    with pytest.raises(rlkit.ConfigError, match=name):
        rlkit.losses.with_kl("ppo", coef=name)


@for_each("place", [0, 1, 2])
@for_each(("changed", "match"), [({"temperature": 0.0}, "greedily"), ({"truncated": True}, "top_p")])
def test_every_datum_is_looked_at(place, changed, match):
    """A sample without usable probabilities is found wherever it stands."""
    data, _ = datums(*example("ppo", np.random.default_rng(0), sizes=(2, 3, 1)))
    data[place] = attrs.evolve(data[place], **changed)
    with pytest.raises(DataError, match=rf"data\[{place}\] was sampled .*{match}"):
        prepare("ppo").check(data)


def test_each_of_a_pair_has_its_own_default():
    """A default that is a tuple holds the chosen one's value and the rejected one's."""

    @loss(level="pair")
    def lopsided(logprobs, scale=(2.0, 3.0)):
        return scale[0] * logprobs[0].sum() + scale[1] * logprobs[1].sum()

    data, leaves = datums([np.array([-1.0]), np.array([-1.0])], {})
    first, second = (d.with_inputs(scale=7.0) for d in data)
    for some, expected in (([first, data[1]], (7.0, 3.0)), ([data[0], second], (2.0, 7.0))):
        found = prepare(lopsided).gradient(leaves, some).driver
        assert [g.item() for g in found] == list(expected)


def test_a_metric_may_have_a_gradient():
    """It is a number all the same; torch's warning would be an error here."""

    def mine(logprobs, advantages):
        return -(advantages * logprobs).sum(), {"mean": logprobs.mean()}

    datum = rlkit.Datum([1, 2, 3], [0, 1, 1], {"advantages": 1.0})
    with rlkit.connect("toy", seed=0) as policy:
        assert np.isfinite(policy.forward_backward([datum], mine).result().metrics["mean:mean"])


PAIR = [
    rlkit.Datum([1, 2, 3, 4], [0, 0, 1, 1], {"reference_logprobs": [-1.0, -1.0]}),
    rlkit.Datum([1, 2, 5], [0, 0, 1], {"reference_logprobs": [-1.0]}),
]


def test_pairs_have_one_prompt_and_a_margin():
    """The margin is what the loss looks at, worked by hand; two prompts in a pair are refused, whatever the loss."""
    lp = [torch.tensor([-1.0, -2.0]), torch.tensor([-2.5])]
    expected = {"dpo": (-1.0 + 1.5, 1.0), "cpo": (-3.0 + 2.5, 0.0), "simpo": (-1.5 + 2.5, 1.0), "orpo": (1.0, 1.0)}
    for name, (margin, accuracy) in expected.items():
        for function in (name, with_kl(name, 0.1)):
            found = prepare(function).gradient(lp * 2, PAIR * 2)  # of ":mean" the sum over four datums
            assert found.metrics == {"margin:mean": 4 * margin, "accuracy:mean": 4 * accuracy}, name
    other = attrs.evolve(PAIR[1], tokens=[1, 9, 5])
    for name in PAIRS:
        prepare(name).check(PAIR)
        with pytest.raises(DataError, match=r"data\[3\]: has a different prompt than data\[2\].*chosen, rejected"):
            prepare(name).check([*PAIR, PAIR[0], other])


def test_a_loss_in_numpy_is_told_to_use_torch():
    """And not to detach, which would leave it without a gradient."""
    for function in (lambda logprobs: np.exp(logprobs).sum(), lambda logprobs: torch.tensor(logprobs.numpy()).sum()):
        with pytest.raises(ConfigError, match=r"numpy.*torch operations") as caught:
            prepare(function).try_out([rlkit.Datum([1, 2], [0, 1])])
        assert "detach" not in str(caught.value)
