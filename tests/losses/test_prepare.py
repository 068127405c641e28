"""``prepare``: what stands between a loss and a backend."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

import rlkit
from rlkit import BackendError, ConfigError, DataError, UnknownNameError
from rlkit.losses import loss, prepare, registry, with_entropy, with_kl
from tests.each import for_each
from tests.losses.calls import ALL, NAMES, PAIRS, call, close, datums, example, gradient

PREPARED = {title: prepare(function) for title, function in ALL.items()}
FLAGGED = [title for title, prepared in PREPARED.items() if prepared.elementwise]
UNFLAGGED = [title for title, prepared in PREPARED.items() if prepared.level == "datum" and not prepared.elementwise]
TOPK = ("topk_forward_kl", "topk_reverse_kl", "topk_jsd")


def tokens(*sizes):
    """Datums with so many tokens of the policy's own."""
    return [rlkit.Datum(range(n + 2), [0, 0] + [1] * n) for n in sizes]


def zeros(data):
    return [torch.zeros(int(datum.mask.sum())) for datum in data]


def without(inputs, *names):
    return {name: values for name, values in inputs.items() if name not in names}


@for_each("title", ALL)
def test_agrees_with_direct_calls(title):
    """What a backend is given is the loss itself, called per datum, pair or batch; parts of a batch add up."""
    driver, inputs = example(ALL[title], np.random.default_rng(4))
    value, gradients, entropies = call(ALL[title], driver, inputs)
    whole = gradient(ALL[title], driver, inputs)
    assert whole.value == pytest.approx(value, rel=1e-4, abs=1e-5)
    for x, y in zip([*whole.driver, *(whole.entropy or [])], [*gradients, *entropies], strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-3, atol=1e-5)
    if PREPARED[title].level == "batch":
        return
    parts = [gradient(ALL[title], driver[i : i + 2], {k: v[i : i + 2] for k, v in inputs.items()}) for i in (0, 2)]
    assert whole.value == pytest.approx(sum(part.value for part in parts), rel=1e-4, abs=1e-5)
    for x, y in zip(whole.driver, [g for part in parts for g in part.driver], strict=True):
        torch.testing.assert_close(x, y)


def concatenated(title, driver, inputs):
    """One call on the tokens of all datums, numbers repeated for each token."""
    sizes = [len(x) for x in driver]
    flat = {
        name: [np.concatenate([np.broadcast_to(v, (n, *np.shape(v)[1:])) for v, n in zip(values, sizes, strict=True)])]
        for name, values in inputs.items()
    }
    value, gradients, _ = call(ALL[title], [np.concatenate(driver)], flat)
    return value, np.split(gradients[0], np.cumsum(sizes)[:-1])


@for_each("title", FLAGGED)
def test_elementwise(title):
    """One call on the concatenated tokens is the sum of the calls per datum."""
    driver, inputs = example(ALL[title], np.random.default_rng(9))
    value, gradients, _ = call(ALL[title], driver, inputs)
    one, parts = concatenated(title, driver, inputs)
    assert one == pytest.approx(value)
    for x, y in zip(parts, gradients, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    close(*(gradient(attrs.evolve(PREPARED[title], elementwise=flag), driver, inputs) for flag in (True, False)))


@for_each("title", UNFLAGGED)
def test_not_elementwise(title):
    """Losses without the flag do look beyond the token: concatenated they are something else."""
    driver, inputs = example(ALL[title], np.random.default_rng(10))
    value = call(ALL[title], driver, inputs)[0]
    if title == "kto":  # one number per sequence
        inputs = {"reference_logprobs": [np.concatenate(inputs["reference_logprobs"])], "desirable": [1.0]}
        driver = [np.concatenate(driver)]
        assert abs(call("kto", driver, inputs)[0] - value) > 1e-4
    else:
        assert abs(concatenated(title, driver, inputs)[0] - value) > 1e-4


@for_each("title", NAMES)
def test_missing_inputs_are_named(title):
    """Each input that is not there is named with the datum that lacks it, and what that has."""
    prepared = PREPARED[title]
    driver, inputs = example(title, np.random.default_rng(0), sizes=(2, 3))
    needed = [*prepared.inputs, *(["target_tokens"] if prepared.driver == "target_logprobs" else [])]
    whole, _ = datums(driver, inputs)
    for name in needed:
        lacking, _ = datums(driver, without(inputs, name))
        for i, data in ((0, lacking), (1, [whole[0], lacking[1]])):
            with pytest.raises(DataError, match=rf"data\[{i}\].inputs lacks '{name}', which the loss '{title}'"):
                prepared.check(data)
    for given, there in (({}, "none"), ({"weights": [1.0, 1.0]}, "weights")):
        if needed:
            with pytest.raises(DataError, match=f"it has: {there}$"):
                prepared.check(datums(driver, given)[0])


def test_settings_of_a_name_and_of_a_function():
    """``config`` binds settings; an unknown one, such as an input, lists those that there are."""
    for given in ("ppo", registry["ppo"]):
        assert prepare(given, {"dual_clip": 2.0}).settings["dual_clip"] == 2.0
        with pytest.raises(ConfigError, match=r"config\['clip'\].*clip_low_threshold, clip_high_threshold, dual_clip"):
            prepare(given, {"clip": 0.2})
    for name, config, message in (
        ("reinforce", {"beta": 1.0}, "There are: none"),
        ("ppo", {"dual_clp": 1.0}, "did you mean 'dual_clip'"),
        ("mix", {"mu": 0.2}, r"config\['mu'\]"),
        ("ppo", 3, "^config: got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(name, config)
    with pytest.raises(UnknownNameError, match="did you mean 'cispo'"):
        prepare("cipso")


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
    """Weights that would do nothing are refused, of a composed loss, too."""

    def plain(logprobs):
        return -logprobs.sum()

    data = [rlkit.Datum.supervised([1], [2, 3])]
    for function in (plain, with_entropy(plain)):
        assert not prepare(function).optional
        with pytest.raises(
            DataError, match=r"data\[0\].inputs has 'weights', which the loss '.*plain.*' does not take"
        ):
            prepare(function).check(data)


def test_some_have_an_input_and_some_have_not():
    """The default of the signature stands in for it; one without a number as its default is there for all or none."""
    for name in ("importance_sampling", "kl_cov", "gspo"):
        driver, inputs = example(name, np.random.default_rng(0), sizes=(2, 3))
        data, leaves = datums(driver, inputs)
        lacking = datums(driver, without(inputs, "weights"))[0][1]
        close(*(prepare(name).gradient(leaves, [data[0], x]) for x in (lacking, data[1].with_inputs(weights=1.0))))
    title = with_kl("cross_entropy", 0.1, "ratio_corrected")
    driver, inputs = example(title, np.random.default_rng(0), sizes=(2, 3), optional=("sampling_logprobs",))
    (first, second), leaves = datums(driver, inputs)
    one, two = datums(driver, without(inputs, "sampling_logprobs"))[0]
    for data in ([first, two], [one, second]):
        with pytest.raises(DataError, match="some datums lack the input 'sampling_logprobs' of the loss 'with_kl"):
            prepare(title).gradient(leaves, data)


def test_each_of_a_pair_has_its_own_default():
    """A default that is a tuple holds the chosen one's value and the rejected one's."""

    @loss(level="pair")
    def lopsided(logprobs, scale=(2.0, 3.0)):
        return scale[0] * logprobs[0].sum() + scale[1] * logprobs[1].sum()

    data = tokens(1, 1)
    first, second = (datum.with_inputs(scale=7.0) for datum in data)
    for some, expected in (([first, data[1]], [7.0, 3.0]), ([data[0], second], [2.0, 7.0])):
        assert [g.item() for g in prepare(lopsided).gradient(zeros(data), some).driver] == expected


@for_each(
    ("changed", "match"), [({"temperature": 0.0}, "sampled greedily"), ({"truncated": True}, "with top_p, top_k")]
)
def test_behaviour_must_have_probabilities(changed, match):
    """Greedy and truncated samples are refused wherever they stand, by losses that form a ratio, and only those."""
    driver, inputs = example("ppo", np.random.default_rng(0), sizes=(2, 3, 1))
    for i in range(3):
        data, _ = datums(driver, {**inputs, "reference_logprobs": driver})
        data[i] = attrs.evolve(data[i], **changed)
        for function in ("ppo", with_kl("reinforce", 0.1, "ratio_corrected")):
            with pytest.raises(DataError, match=rf"data\[{i}\] was .*{match}.*{prepare(function).name.split('(')[0]}"):
                prepare(function).check(data)
        for name in ("cross_entropy", "reinforce"):
            prepare(name).check(data)


def test_metrics():
    """A metric's name says how it combines; without a word on it it is a mean, which elementwise losses cannot give."""

    def measured(logprobs):
        n = logprobs.numel()
        mean = logprobs.mean().exp()  # a number all the same, though it has a gradient
        return -logprobs.sum(), {"a:sum": 2.0, "b:mean": torch.tensor(0.5), "c": n, "d_max": n, "d:min": n, "e": mean}

    data = tokens(3, 1, 0)
    found = prepare(measured).gradient(zeros(data), data)
    means = {"b:mean": 1.0, "c:mean": 4.0, "e:mean": 2.0}  # still summed over datums
    assert dict(found.metrics) == {"a:sum": 4.0, **means, "d_max:max": 3.0, "d:min": 1.0}
    assert [x.shape for x in found.driver] == [(3,), (1,), (0,)]

    @loss(elementwise=True)
    def flagged(logprobs):
        return logprobs.sum(), {"size": logprobs.numel()}

    with pytest.raises(ConfigError, match="metric 'size:mean' of the elementwise loss 'flagged'.*':sum'"):
        prepare(flagged).gradient(zeros(data), data)


@pytest.mark.parametrize("level", ["datum", "pair", "batch"])
def test_means_are_over_the_datums_that_the_loss_was_given(level):
    """A mean counts once for each datum of its call; a datum without own tokens is none, in any micro-batches."""

    @loss(level=level)
    def measured(logprobs):
        parts = [logprobs] if level == "datum" else logprobs
        return sum(part.sum() for part in parts), {"size": sum(part.numel() for part in parts), "one": 1.0}

    data = tokens(1, 2, 2, 3)
    found = prepare(measured).gradient(zeros(data), data)
    size = {"datum": 8.0, "pair": 2 * (3.0 + 5.0), "batch": 4 * 8.0}[level]
    assert dict(found.metrics) == {"size:mean": size, "one:mean": 4.0}
    if level != "pair":  # where each datum has a token
        data[1:1] = tokens(0, 0)
    with rlkit.connect("toy", seed=0) as policy:
        metrics = policy.forward_backward(data, measured).result().metrics
        assert (metrics["one:mean"], metrics["size:mean"], metrics["datums:sum"]) == (1.0, size / 4, len(data))
        if level != "pair":
            assert set(policy.forward(tokens(0), measured).result().metrics) == {"loss:sum", "tokens:sum", "datums:sum"}


def test_pairs():
    """An odd number of datums, one of a pair without tokens, and a pair of two prompts are refused."""
    assert set(PAIRS) == {name for name in NAMES if PREPARED[name].level == "pair"}
    lp = [torch.tensor([-1.0, -2.0]), torch.tensor([-2.5])]
    one, two = (
        rlkit.Datum([1, 2, 3, 4], [0, 0, 1, 1], {"reference_logprobs": [-1.0, -1.0]}),
        rlkit.Datum([1, 2, 5], [0, 0, 1], {"reference_logprobs": [-1.0]}),
    )
    other = attrs.evolve(two, tokens=[1, 9, 5])
    elsewhere = [attrs.evolve(one, tokens=[1, 9, 3, 4]), other]  # another prompt, in a pair of its own
    for name in PAIRS:
        prepare(name).check([one, two, *elsewhere])
        for data, message in (
            ([one, two, one], rf"3 datums; the loss '{name}' takes \(chosen, rejected\) pairs"),
            ([one, attrs.evolve(two, mask=[0, 0, 0])], r"data\[1\].mask is all False"),
            ([one, two, one, other], r"data\[3\]: has a different prompt than data\[2\].*chosen, rejected"),
        ):
            with pytest.raises(DataError, match=message):
                prepare(name).check(data)
    # The margin is what the loss looks at, worked by hand.
    expected = {"dpo": (-1.0 + 1.5, 1.0), "cpo": (-3.0 + 2.5, 0.0), "simpo": (-1.5 + 2.5, 1.0), "orpo": (1.0, 1.0)}
    for name, (margin, accuracy) in expected.items():
        for function in (name, with_kl(name, 0.1)):
            found = prepare(function).gradient(lp * 2, [one, two] * 2)  # of ":mean" the sum over four datums
            assert found.metrics == {"margin:mean": 4 * margin, "accuracy:mean": 4 * accuracy}, name


@for_each("name", ["ppo", "gspo", "kl_cov", "dpo"])
def test_gradient_that_is_not_finite(name):
    """A NaN among the logprobs, or an overflow, is a BackendError that names loss and datum."""
    driver, inputs = example(name, np.random.default_rng(0), sizes=(2, 2))
    driver[1] = np.array([-1.0, np.nan])
    with pytest.raises(BackendError, match=rf"the loss '{name}' has a non-finite gradient at data\[[01]\]"):
        gradient(name, driver, inputs)


def test_entropy_or_value_that_is_not_finite():
    """One entry is enough, in whichever datum; the user's place of it is named."""

    def rooted(logprobs, entropy):
        return logprobs.sum() + entropy.sqrt().sum()

    def endless(logprobs):
        return logprobs.sum() + float("inf")

    data = tokens(2, 2)
    for i, entropies in enumerate(([[0.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 0.0]])):
        for places in (None, [5, 6]):
            place = i if places is None else places[i]
            entropy = [torch.tensor(e) for e in entropies]
            with pytest.raises(BackendError, match=rf"the loss 'rooted' has a non-finite gradient at data\[{place}\]"):
                prepare(rooted).gradient(zeros(data), data, entropy=entropy, places=places)
    with pytest.raises(ConfigError, match="names entropy, but none was given"):
        prepare(rooted).gradient(zeros(data), data)
    with pytest.raises(BackendError, match="the loss 'endless' is inf"):
        prepare(endless).gradient(zeros(data), data)


def test_datums_without_tokens():
    """They are not given to the loss and have a gradient of length 0; only they: nothing at all."""
    driver, inputs = example("gspo", np.random.default_rng(0), sizes=(2,))
    data, leaves = datums(driver, inputs)
    empty = attrs.evolve(data[0], mask=np.zeros(4, bool))
    found = prepare("gspo").gradient([leaves[0][:0], *leaves], [empty, *data])
    assert found.driver[0].shape == (0,)
    close(attrs.evolve(found, driver=found.driver[1:]), prepare("gspo").gradient(leaves, data))
    nothing = prepare("gspo").gradient([leaves[0][:0]], [empty])
    assert (nothing.value, nothing.driver[0].shape) == (0.0, (0,))


NO_LOSSES = [
    (lambda: prepare(lambda advantages, logprobs: 0), "the first parameter of the loss '<lambda>' must be one of"),
    (lambda: prepare(lambda logprobs, *others: 0), r"the loss '<lambda>' takes \*others"),
    (lambda: prepare(lambda logprobs, **others: 0), r"the loss '<lambda>' takes \*\*others"),
    (lambda: prepare(lambda logprobs, *, beta: 0), "config lacks 'beta'"),
    (lambda: prepare(dict), "the loss 'dict'"),
    (lambda: loss(level="token"), r"^loss\(level\): got 'token'"),
    (lambda: loss(elementwise=1), r"^loss\(elementwise\): got 1"),
    (lambda: loss(level="pair", elementwise=True), r"^loss\(elementwise=True\) needs level 'datum'; got 'pair'"),
    (lambda: with_kl("ppo", -0.1), "^kl_coef"),
    (lambda: with_kl("ppo", float("nan")), "^kl_coef"),
    (lambda: with_kl("ppo", "not a name"), "^coef"),
    *[(lambda n=n: with_kl("ppo", n), n) for n in ("logprobs", "weights", "advantages", "reference_logprobs")],
    (lambda: with_kl("ppo", "clip_low_threshold"), "already has a parameter 'clip_low_threshold'"),
    (lambda: with_kl(with_kl("ppo")), "already has a parameter 'kl_coef'"),
    (lambda: with_kl("value_huber"), "driven by 'values'"),
    (lambda: with_kl(lambda logprobs, *others: 0), "one by one"),
    (lambda: with_entropy("ppo", float("inf")), "^entropy_coef"),
    (lambda: with_entropy("ppo", None), "^entropy_coef"),
    (lambda: prepare("pppo"), "no loss named"),
    (lambda: with_kl("pppo"), "no loss named"),
]


@for_each(("make", "message"), NO_LOSSES)
def test_what_cannot_be_a_loss(make, message):
    """A signature, marks or a composition that cannot work is refused before anything runs."""
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        make()


@for_each(
    ("marks", "sizes", "tried"),
    [
        ({"elementwise": True}, [[6]], [2]),
        ({}, [[2], [3], [1]], [2]),
        ({"level": "pair"}, [[2, 3], [1, 2]], [2, 3]),
        ({"level": "batch"}, [[2, 3, 1]], [2, 3, 1]),
    ],
)
def test_calls_by_level(marks, sizes, tried):
    """One call for all tokens, for each datum, for each pair or for the batch; none for datums without tokens.

    A loss is tried out by one call, on one datum or one pair where that is all that it looks at.
    """
    calls = []

    @loss(**marks)
    def counted(logprobs):
        parts = [logprobs] if isinstance(logprobs, torch.Tensor) else logprobs
        assert type(logprobs) is {"pair": tuple, "batch": list}.get(marks.get("level"), torch.Tensor)
        calls.append([part.shape[0] for part in parts])
        return sum(part.sum() for part in parts)

    data = tokens(*([2, 3, 1, 2] if "pair" in marks.values() else [2, 0, 3, 1]))
    found = prepare(counted).gradient(zeros(data), data)
    assert calls == sizes
    assert [g.tolist() for g in found.driver] == [[1.0] * len(x) for x in zeros(data)]
    calls.clear()
    prepare(counted).try_out(data)
    assert calls == [tried]


def test_datums_that_a_loss_does_not_look_at():
    """A batch loss that leaves a datum out gives it a gradient of 0."""

    @loss(level="batch")
    def first_only(logprobs):
        return logprobs[0].sum()

    data = tokens(2, 1)
    assert [g.tolist() for g in prepare(first_only).gradient(zeros(data), data).driver] == [[1.0, 1.0], [0.0]]


@for_each(
    ("function", "message"),
    [
        (lambda logprobs: logprobs, r"returned a tensor of shape \(2,\)"),
        (lambda logprobs: 1.0, "returned 1.0"),
        (lambda logprobs: (logprobs.sum(), 3), "returned metrics 3"),
        (lambda logprobs: (logprobs.sum(), {"loss:sum": 1.0}), "returned the metric 'loss:sum'"),
        (lambda logprobs: (logprobs.sum(), {3: 1.0}), "returned the metric 3"),
        (lambda logprobs: logprobs.detach().sum(), "does not depend on logprobs"),
        (lambda logprobs: np.exp(logprobs).sum(), r"numpy, which passes no gradient; expected torch operations"),
        (
            lambda logprobs: torch.tensor(logprobs.numpy()).sum(),
            r"numpy, which passes no gradient; expected torch operat",
        ),
    ],
)
def test_losses_that_return_something_else(function, message):
    """A vector, a number, or what does not depend on the logprobs, is refused when it is tried out."""
    with pytest.raises(ConfigError, match=message):
        prepare(function).try_out(tokens(2))
    with pytest.raises(BackendError, match=r"returned the metric 'size' = nan; expected a finite number"):
        prepare(lambda logprobs: (logprobs.sum(), {"size": float("nan")})).gradient(zeros(tokens(2)), tokens(2))


def test_composed_losses_have_the_inputs_and_settings_of_both():
    """Needed inputs, optional ones and settings of the loss and of the term; names that meet are one."""
    prepared = prepare(with_kl("ppo", 0.2, "clamped"), {"kl_coef": 0.5, "dual_clip": 2.0, "value_bound": 3.0})
    assert prepared.name == "with_kl(ppo)"
    assert prepared.inputs == ("sampling_logprobs", "advantages", "reference_logprobs")
    assert dict(prepared.optional) == {"weights": 1.0}
    assert [prepared.settings[key] for key in ("kl_coef", "dual_clip", "value_bound")] == [0.5, 2.0, 3.0]
    assert prepare(with_kl("dpo")).inputs == ("reference_logprobs",)
    corrected = prepare(with_kl("opmd", 0.1, "ratio_corrected"))
    assert corrected.inputs == ("advantages", "reference_logprobs")
    assert dict(corrected.optional) == {"weights": 1.0, "sampling_logprobs": None}
    assert dict(corrected.settings) == {"tau": 1.0, "kl_coef": 0.1}
    assert prepare(with_kl("ppo", 0.1, "ratio_corrected")).inputs == prepared.inputs
    assert prepare(with_kl("ppo", "beta_now")).inputs[-1] == "beta_now"
    assert "kl_coef" not in prepare(with_kl("ppo", "beta_now")).settings
    nested = prepare(with_entropy(with_kl("gspo")))
    assert (nested.name, nested.entropy) == ("with_entropy(with_kl(gspo))", True)
    assert {"kl_coef", "entropy_coef", "clip_low_threshold"} == {*nested.settings} - {"clip_high_threshold"}
    levels = [(prepare(with_kl(name)).level, prepare(with_kl(name)).elementwise) for name in ("ppo", "gspo")]
    assert levels == [("datum", True), ("datum", False)]
    assert [prepare(with_kl(name)).level for name in ("simpo", "kl_cov")] == ["pair", "batch"]
    assert with_kl("ppo").__doc__.startswith("-sum w min(r A")

    def loose(logprobs, weights=1.0, reference_logprobs=-1.0, sampling_logprobs=-1.0):
        return -(weights * (logprobs - reference_logprobs) * (logprobs - sampling_logprobs)).sum()

    # An input that the term needs is needed; one that both can do without keeps the loss's default.
    prepared = prepare(with_kl(loose, 0.1, "ratio_corrected"))
    assert prepared.inputs == ("reference_logprobs",)
    assert dict(prepared.optional) == {"weights": 1.0, "sampling_logprobs": -1.0}


def test_composed_settings_take_effect():
    """The coefficient by config, by the factory, and by an input is one and the same, and is checked when called."""
    driver, inputs = example(with_kl("ppo", "c"), np.random.default_rng(0), optional=("weights",))
    inputs = without(inputs, "c")
    by_factory = gradient(with_kl("ppo", 0.7), driver, inputs)
    close(by_factory, gradient(prepare(with_kl("ppo"), {"kl_coef": 0.7}), driver, inputs))
    close(by_factory, gradient(with_kl("ppo", "c"), driver, {**inputs, "c": [0.7] * 4}))
    tight = gradient(prepare(with_kl("ppo", 0.0), {"clip_high_threshold": 1.01}), driver, inputs)
    plain = without(inputs, "reference_logprobs")
    close(tight, gradient(prepare("ppo", {"clip_high_threshold": 1.01}), driver, plain))
    with pytest.raises(ConfigError, match="^kl_coef"):
        gradient(prepare(with_kl("ppo"), {"kl_coef": -1.0}), driver, inputs)
    entropy = {**plain, "entropy": driver}
    gradient(prepare(with_entropy("ppo"), {"entropy_coef": -1.0}), driver, entropy)  # which makes the policy surer


def test_terms_of_a_loss_of_ones_own():
    """Its metrics pass through; without weights a term counts once per token of a pair."""

    def measured(logprobs, advantages):
        return -(advantages * logprobs).sum(), {"size:sum": logprobs.numel()}

    driver, inputs = example(with_kl(measured), np.random.default_rng(0), optional=())
    found = gradient(with_kl(measured, 0.5), driver, inputs)
    assert found.metrics == {"size:sum": 15.0}
    assert found.value == pytest.approx(call(with_kl("reinforce", 0.5), driver, inputs)[0], rel=1e-5)

    @loss(level="pair")
    def margin(logprobs):
        return logprobs[1].sum() - logprobs[0].sum()

    driver, inputs = example(with_kl("simpo"), np.random.default_rng(0), sizes=(2, 3), optional=())
    plain = driver[1].sum() - driver[0].sum()
    squares = sum(((a - b) ** 2).sum() for a, b in zip(driver, inputs["reference_logprobs"], strict=True))
    assert call(with_kl(margin, 0.5, "k2"), driver, inputs)[0] == pytest.approx(plain + 0.25 * squares)


def full(seed, n=3, v=6):
    return np.log(np.random.default_rng(seed).dirichlet(np.ones(v), n))


def test_topk_over_the_whole_vocabulary():
    """They are the divergences themselves: not negative, 0 where both agree, the Jensen-Shannon one symmetric."""
    s, t = full(0), full(1)
    kl = (np.exp(t) * (t - s)).sum(), (np.exp(s) * (s - t)).sum()
    value = {name: call(name, [s], {"teacher_logprobs": [t]})[0] for name in TOPK}
    assert (value["topk_forward_kl"], value["topk_reverse_kl"]) == pytest.approx(kl)
    assert call("topk_jsd", [t], {"teacher_logprobs": [s]})[0] == pytest.approx(value["topk_jsd"])
    assert 0 < value["topk_jsd"] < 3 * np.log(2)
    for name in TOPK:
        assert call(name, [s], {"teacher_logprobs": [s]})[0] == pytest.approx(0, abs=1e-12)
    near = call("topk_jsd", [s], {"teacher_logprobs": [t]}, {"beta": 1e-6})[0] / 1e-6
    assert near == pytest.approx(kl[0], rel=1e-4)  # beta to 0: JSD / beta is KL(teacher || model)


@for_each("name", TOPK)
def test_no_token_no_loss(name):
    """Entries with target -1 add exactly nothing, whatever stands there; each datum may have another number of them."""
    s, t = full(0), full(1)
    targets = np.arange(18).reshape(3, 6)
    wide = {"teacher_logprobs": [t], "target_tokens": [targets]}
    narrow = {"teacher_logprobs": [t[:, :2]], "target_tokens": [targets[:, :2]]}
    both = gradient(name, [s, s[:, :2]], {k: [*wide[k], *narrow[k]] for k in wide})
    parts = gradient(name, [s], wide), gradient(name, [s[:, :2]], narrow)
    close(both, attrs.evolve(parts[0], value=sum(p.value for p in parts), driver=[p.driver[0] for p in parts]))
    targets[:, 4:] = -1
    short = call(name, [s[:, :4]], {"teacher_logprobs": [t[:, :4]], "target_tokens": [targets[:, :4]]})
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
    logprobs = PREPARED[title].driver == "logprobs"
    driver = driver if logprobs else [np.zeros(len(x)) for x in driver]
    data, _ = datums(driver, inputs)
    with rlkit.connect("toy", seed=0) as policy:
        output = policy.forward_backward(data, ALL[title], want=("entropy",)).result()
        if PREPARED[title].entropy:
            inputs["entropy"] = [d.select(e) for d, e in zip(data, output.outputs["entropy"], strict=True)]
        if logprobs:
            expected = call(ALL[title], output.selected, inputs)[0]
            assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert np.isfinite(output.metrics["loss:sum"])
        policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()


def test_training_on_a_backend():
    """A top-k loss moves the toy towards its teacher; nothing but an entropy bonus raises its entropy."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 100, (3, 4))
    targets[1, 2] = -1
    taught = {"target_tokens": targets, "teacher_logprobs": np.log(rng.dirichlet(np.ones(4), 3))}
    bonus = with_entropy("reinforce", 1.0)
    for function, inputs, rate in (("topk_forward_kl", taught, 0.05), (bonus, {"advantages": [0.0] * 3}, 0.02)):
        values = []
        with rlkit.connect("toy", seed=0) as policy:
            for _ in range(5):
                datum = rlkit.Datum([65, 66, 67, 68], [0, 1, 1, 1], inputs)
                values.append(policy.forward_backward([datum], function).result().metrics["loss:sum"])
                policy.optim_step(rlkit.Adam(learning_rate=rate)).result()
        assert values == sorted(values, reverse=True)
        assert values[0] < 0 if function is bonus else values[-1] < 0.9 * values[0]
