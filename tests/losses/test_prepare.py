"""``prepare``: the layer between a loss and a backend."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

import rlkit
from rlkit import BackendError, ConfigError, DataError, UnknownNameError
from rlkit.losses import loss, prepare, registry, with_entropy, with_kl
from rlkit.losses.prepare import marks
from tests.each import for_each
from tests.losses.calls import ALL, NAMES, call, close, datums, example, gradient

MEAN = loss(elementwise=True)(lambda logprobs: logprobs.mean())
PREPARED = {title: prepare(function) for title, function in ALL.items()}


def make(*sizes):
    """Return datums with so many tokens of the policy, and logprobs of 0."""
    data = [rlkit.Datum(range(n + 2), [0, 0] + [1] * n) for n in sizes]
    return data, [torch.zeros(n) for n in sizes]


def draw(title, **options):
    return example(ALL.get(title, title), np.random.default_rng(0), **options)


def without(inputs, *names):
    return {name: values for name, values in inputs.items() if name not in names}


@for_each("title", [title for title in ALL if PREPARED[title].level == "datum"])
def test_a_backend_gets_the_loss_itself(title):
    """It is called per datum, or once on the tokens of all datums, which is the same for elementwise losses alone."""
    driver, inputs = draw(title)
    value, gradients, entropies = call(ALL[title], driver, inputs)
    for flag in (True, False):
        if flag and title == "kto":  # which takes one number per sequence
            continue
        found = gradient(attrs.evolve(PREPARED[title], elementwise=flag), driver, inputs)
        if flag and not PREPARED[title].elementwise:
            assert abs(found.value - value) > 1e-4
            continue
        assert found.value == pytest.approx(value, rel=1e-5, abs=1e-5)
        for x, y in zip([*found.driver, *(found.entropy or [])], [*gradients, *entropies], strict=True):
            np.testing.assert_allclose(x.numpy(), y, rtol=1e-5, atol=1e-5)


@for_each("title", NAMES)
def test_missing_inputs_are_named(title):
    """The error names the datum, the input that it lacks, and those that it has."""
    prepared = PREPARED[title]
    driver, inputs = draw(title, sizes=(2, 3))
    whole = datums(driver, inputs)[0]
    for name in (*prepared.inputs, *(["target_tokens"] if prepared.driver == "target_logprobs" else [])):
        lacking, there = datums(driver, without(inputs, name))[0], ", ".join(sorted(inputs.keys() - {name})) or "none"
        for i, data in ((0, lacking), (1, [whole[0], lacking[1]])):
            message = rf"data\[{i}\].inputs lacks '{name}', which the loss '{title}' needs; it has: {there}$"
            with pytest.raises(DataError, match=message):
                prepared.check(data)


def test_weights_for_a_loss_that_has_none():
    """Weights that would have no effect are refused, also by a composed loss."""
    for function in (lambda logprobs: -logprobs.sum(), with_entropy(lambda logprobs: -logprobs.sum())):
        assert not prepare(function).optional
        with pytest.raises(DataError, match=r"^data\[0\].inputs has 'weights', which the loss '.*' does not take"):
            prepare(function).check([rlkit.Datum.supervised([1], [2, 3])])
    with pytest.raises(DataError, match="has 'weight', .*; did you mean 'weights'"):
        prepare("cross_entropy").check([rlkit.Datum([1, 2], [0, 1], {"weight": 0.0})])


def test_an_input_that_some_datums_lack():
    """The default of the signature stands in for it; an input without a number as its default is for all or none."""
    for name in ("importance_sampling", "kl_cov", "gspo"):
        driver, inputs = draw(name, sizes=(2, 3))
        data, leaves = datums(driver, inputs)
        lacking = datums(driver, without(inputs, "weights"))[0][1]
        close(*(prepare(name).gradient(leaves, [data[0], x]) for x in (lacking, data[1].with_inputs(weights=1.0))))
    corrected = with_kl("cross_entropy", 0.1, "ratio_corrected")
    driver, inputs = draw(corrected, sizes=(2, 3), optional=("sampling_logprobs",))
    data, leaves = datums(driver, inputs)
    lacking = datums(driver, without(inputs, "sampling_logprobs"))[0]

    @loss(level="pair")
    def lopsided(logprobs, scale=(2.0, 3.0)):  # a default for each of a pair
        return scale[0] * logprobs[0].sum() + scale[1] * logprobs[1].sum()

    bare, ones = make(1, 1)
    for i, expected in enumerate(([2.0, 7.0], [7.0, 3.0])):
        some = [lacking[k] if k == i else data[k] for k in (0, 1)]
        with pytest.raises(DataError, match="some datums lack the input 'sampling_logprobs' of the loss 'with_kl"):
            prepare(corrected).gradient(leaves, some)
        some = [bare[k] if k == i else bare[k].with_inputs(scale=7.0) for k in (0, 1)]
        assert [g.item() for g in prepare(lopsided).gradient(ones, some).driver] == expected


def test_behaviour_must_have_probabilities():
    """Losses that form a ratio, and only those, refuse greedy and truncated samples."""
    driver, inputs = draw("ppo", sizes=(2, 3, 1))
    for i, changed, match in (
        (2, {"temperature": 0.0}, "sampled greedily"),
        (1, {"truncated": True}, "with top_p, top_k"),
    ):
        data, _ = datums(driver, {**inputs, "reference_logprobs": driver})
        data[i] = attrs.evolve(data[i], **changed)
        for function in ("ppo", with_kl("reinforce", 0.1, "ratio_corrected")):
            with pytest.raises(DataError, match=rf"data\[{i}\] was .*{match}.*{prepare(function).name.split('(')[0]}"):
                prepare(function).check(data)
        for name in ("cross_entropy", "reinforce"):
            prepare(name).check(data)


def test_metrics():
    """A metric's name says how it combines; the default is a mean."""

    def measured(logprobs):
        n = logprobs.numel()
        mean = logprobs.mean().exp()  # a number all the same, though it has a gradient
        return -logprobs.sum(), {"a:sum": 2.0, "b:mean": torch.tensor(0.5), "c": n, "d_max": n, "d:min": n, "e": mean}

    data, leaves = make(3, 1, 0)
    found = prepare(measured).gradient(leaves, data)
    means = {"b:mean": 1.0, "c:mean": 4.0, "e:mean": 2.0}  # still summed over datums
    assert dict(found.metrics) == {"a:sum": 4.0, **means, "d_max:max": 3.0, "d:min": 1.0}
    assert [x.shape for x in found.driver] == [(3,), (1,), (0,)]
    with pytest.raises(BackendError, match=r"returned the metric 'size' = nan; expected a finite number"):
        prepare(lambda logprobs: (logprobs.sum(), {"size": float("nan")})).gradient(leaves, data)


def test_pairs():
    """An odd number of datums, a pair with a datum without tokens, and a pair of two prompts are refused."""
    one = rlkit.Datum([1, 2, 3, 4], [0, 0, 1, 1], {"reference_logprobs": [-1.0, -1.0]})
    two = rlkit.Datum([1, 2, 5], [0, 0, 1], {"reference_logprobs": [-1.0]})
    other = attrs.evolve(two, tokens=[1, 9, 5])
    lp = [torch.tensor([-1.0, -2.0]), torch.tensor([-2.5])]
    expected = {"dpo": (-1.0 + 1.5, 1.0), "cpo": (-3.0 + 2.5, 0.0), "simpo": (-1.5 + 2.5, 1.0), "orpo": (1.0, 1.0)}
    for name, (margin, accuracy) in expected.items():  # the margin of what the loss compares, by hand
        prepare(name).check([one, two, attrs.evolve(one, tokens=[1, 9, 3, 4]), other])
        for data, message in (
            ([one, two, one], rf"3 datums; the loss '{name}' takes \(chosen, rejected\) pairs"),
            ([one, attrs.evolve(two, mask=[0, 0, 0])], r"data\[1\].mask is all False"),
            ([one, two, one, other], r"data\[3\]: has a different prompt than data\[2\].*chosen, rejected"),
        ):
            with pytest.raises(DataError, match=message):
                prepare(name).check(data)
        for function in (name, with_kl(name, 0.1)):
            found = prepare(function).gradient(lp * 2, [one, two] * 2)  # of ":mean" the sum over four datums
            assert found.metrics == {"margin:mean": 4 * margin, "accuracy:mean": 4 * accuracy}, name


def test_not_finite():
    """A NaN among the logprobs, an overflow, or one bad entropy is an error that names loss and datum."""

    def rooted(logprobs, entropy):
        return logprobs.sum() + entropy.sqrt().sum()

    for name in ("ppo", "gspo", "kl_cov", "dpo"):
        driver, inputs = draw(name, sizes=(2, 2))
        driver[1] = np.array([-1.0, np.nan])
        with pytest.raises(BackendError, match=rf"the loss '{name}' has a non-finite gradient at data\[[01]\]"):
            gradient(name, driver, inputs)
    data, leaves = make(2, 2)
    for i, places, place in ((0, [5, 6], 5), (1, None, 1)):  # the user's indices
        entropy = [torch.tensor([1.0, float(k != i)]) for k in (0, 1)]
        with pytest.raises(BackendError, match=rf"the loss 'rooted' has a non-finite gradient at data\[{place}\]"):
            prepare(rooted).gradient(leaves, data, entropy=entropy, places=places)
    with pytest.raises(ConfigError, match="names entropy, but none was given"):
        prepare(rooted).gradient(leaves, data)
    with pytest.raises(BackendError, match="the loss '<lambda>' is inf"):
        prepare(lambda logprobs: logprobs.sum() + float("inf")).gradient(leaves, data)


KNOWN = "clip_low_threshold, clip_high_threshold, dual_clip"
UNNAMED = ("logprobs", "weights", "advantages", "reference_logprobs", "not a name")
BAD = [
    (prepare, (lambda advantages, logprobs: 0,), "the first parameter of the loss '<lambda>' must be"),
    (prepare, (lambda logprobs, *others: 0,), r"has the variadic positional parameter '\*others'"),
    (prepare, (lambda logprobs, **others: 0,), r"has the variadic keyword parameter '\*\*others'"),
    (prepare, (lambda logprobs, /: 0,), "has the positional-only parameter 'logprobs'"),
    (prepare, (lambda logprobs, *, beta: 0,), "config lacks 'beta'"), (prepare, (dict,), "the loss 'dict'"),
    (prepare, (lambda logprobs, b=1: 0, {"b": 2}), r"no such setting; b is an input: put it after \*"),
    *[(prepare, (ppo, {"clip": 0.2}), rf"config\['clip'\].*{KNOWN}") for ppo in ("ppo", registry["ppo"])],
    (prepare, ("reinforce", {"beta": 1.0}), "There are: none"), (prepare, ("mix", {"mu": 0.2}), r"config\['mu'\]"),
    (prepare, ("ppo", {"dual_clp": 1.0}), "did you mean 'dual_clip'"), (prepare, ("ppo", 3), "^config: got 3"),
    (prepare, ("cipso",), "no loss named 'cipso'.*did you mean 'cispo'"), (with_kl, ("pppo",), "no loss named"),
    (lambda level: loss(level=level), ("token",), r"^loss\(level\): got 'token'"),
    (lambda flag: loss(elementwise=flag), (1,), r"^loss\(elementwise\): got 1"),
    (lambda level: loss(level=level, elementwise=True), ("pair",), r"^loss\(elementwise=True\) needs level 'datum'"),
    *[(with_kl, ("ppo", coef), "^kl_coef") for coef in (-0.1, float("nan"))],
    *[(with_kl, ("ppo", name), f"^coef: .*'{name}'") for name in UNNAMED],
    (with_kl, ("ppo", "clip_low_threshold"), "already has a parameter 'clip_low_threshold'"),
    (with_kl, (with_kl("ppo"),), "already has a parameter 'kl_coef'"),
    (with_kl, ("value_huber",), "driven by 'values'"), (with_kl, (lambda logprobs, *others: 0,), "one by one"),
    *[(with_entropy, ("ppo", coef), "^entropy_coef") for coef in (float("inf"), None)],
]  # fmt: skip


@for_each(("build", "arguments", "message"), BAD)
def test_bad_losses_are_refused(build, arguments, message):
    """A signature, settings, marks or a composition that cannot work is an error before anything runs."""
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        build(*arguments)


@for_each(
    ("level", "elementwise", "sizes", "means", "kind"),
    [
        ("datum", True, [[6]], {}, torch.Tensor),
        ("datum", False, [[2], [3], [1]], {"size:mean": 2 + 3 + 1, "one:mean": 3}, torch.Tensor),
        ("pair", False, [[2, 3], [1, 2]], {"size:mean": 2 * 5 + 2 * 3, "one:mean": 4}, tuple),
        ("batch", False, [[2, 3, 1]], {"size:mean": 3 * 6, "one:mean": 3}, list),
    ],
)
def test_calls_by_level(level, elementwise, sizes, means, kind):
    """One call for all tokens, for each datum, for each pair or for the batch; none for datums without tokens.

    A mean counts once for each datum of its call. A loss is tried out by one call, on one datum or one pair where it
    looks at no more; an elementwise one also on the last datum, alone and beside the first.
    """
    calls = []

    @loss(level=level, elementwise=elementwise)
    def counted(logprobs, weights=1.0):
        assert isinstance(weights, float if level == "datum" else kind)
        parts = [logprobs] if level == "datum" else logprobs
        assert type(logprobs) is kind
        calls.append([len(part) for part in parts])
        value = parts[0].sum()  # the others have a gradient of 0
        return value if elementwise else (value, {"size": sum(calls[-1]), "one": 1.0})

    data, leaves = make(*([2, 3, 1, 2] if level == "pair" else [2, 0, 3, 1]))
    found = prepare(counted).gradient(leaves, data)
    prepare(counted).try_out(data)
    tried = [[2], [1], [3]] if elementwise else [[2]] if level == "datum" else sizes[:1]
    assert calls == [*sizes, *tried]
    used = {"pair": (0, 2), "batch": (0,)}.get(level, range(4))
    assert [g.tolist() for g in found.driver] == [[float(i in used)] * len(x) for i, x in enumerate(leaves)]
    assert found.metrics == means
    with rlkit.connect("toy", seed=0) as policy:
        metrics = policy.forward_backward(data, counted).result().metrics
    assert {name: metrics[name] for name in means} == {name: value / means["one:mean"] for name, value in means.items()}


@for_each(
    ("function", "message"),
    [
        (lambda logprobs: logprobs, r"returned a tensor of shape \(2,\)"),
        (lambda logprobs: 1.0, "returned 1.0"),
        (lambda logprobs: (logprobs.sum(), 3), "returned metrics 3"),
        (lambda logprobs: (logprobs.sum(), {"loss:sum": 1.0}), "returned the metric 'loss:sum'"),
        (lambda logprobs: (logprobs.sum(), {3: 1.0}), "returned the metric 3"),
        (lambda logprobs: (logprobs.sum(), {"kl": torch.ones(2)}), "the metric 'kl' = .*; expected one number"),
        (lambda logprobs: (logprobs.sum(), {"kl": "1"}), "the metric 'kl' = '1' .*; expected one number"),
        (loss(elementwise=True)(lambda logprobs: (logprobs.sum(), {"n": 1})), "'n:mean' of the elementwise .*':sum'"),
        (MEAN, "the elementwise loss .* another gradient among more tokens; expected a sum over tokens"),
        (with_entropy(MEAN), "another gradient among more tokens"),
        (lambda logprobs: logprobs.detach().sum(), "does not depend on logprobs"),
        (lambda logprobs: np.exp(logprobs).sum(), "numpy, which passes no gradient; expected torch operations"),
        (lambda logprobs: torch.tensor(logprobs.numpy()).sum(), "numpy, which passes no gradient; expected torch"),
    ],
)
def test_bad_results_are_refused(function, message):
    """What cannot be a loss's value or its metrics is an error when the loss is tried out."""
    with pytest.raises(ConfigError, match=message):
        prepare(function).try_out(make(2)[0])


def test_composed_losses_have_the_inputs_and_settings_of_both():
    """Inputs with one name are one, needed if either needs it; optional ones keep the loss's default."""

    def loose(logprobs, weights=1.0, reference_logprobs=-1.0, sampling_logprobs=-1.0):
        return -(weights * (logprobs - reference_logprobs) * (logprobs - sampling_logprobs)).sum()

    ratio, reference, weights = ("sampling_logprobs", "advantages"), ("reference_logprobs",), {"weights": 1.0}
    for composed, inputs, optional in (
        (with_kl("ppo"), (*ratio, *reference), weights),
        (with_kl("ppo", "beta_now"), (*ratio, *reference, "beta_now"), weights),
        (with_kl("dpo"), reference, weights),
        (with_kl("opmd", 0.1, "ratio_corrected"), ("advantages", *reference), {**weights, "sampling_logprobs": None}),
        (with_kl("ppo", 0.1, "ratio_corrected"), (*ratio, *reference), weights),
        (with_kl(loose, 0.1, "ratio_corrected"), reference, {**weights, "sampling_logprobs": -1.0}),
    ):
        assert (prepare(composed).inputs, dict(prepare(composed).optional)) == (inputs, optional)
    changed = {"kl_coef": 0.5, "dual_clip": 2.0, "value_bound": 3.0}
    assert prepare(with_kl("ppo", 0.2, "clamped"), changed).settings.items() >= changed.items()
    assert "kl_coef" not in prepare(with_kl("ppo", "beta_now")).settings
    nested = prepare(with_entropy(with_kl("gspo")))
    assert (nested.name, nested.entropy) == ("with_entropy(with_kl(gspo))", True)
    assert {*nested.settings} == {"kl_coef", "entropy_coef", "clip_low_threshold", "clip_high_threshold"}
    for name in ("ppo", "gspo", "simpo", "kl_cov"):
        assert marks(with_kl(name)) == marks(registry[name])


def test_settings_of_a_term_are_checked_when_called():
    """A coefficient of KL is at least 0, one of entropy may make the policy surer; metrics of the loss pass through."""
    driver, inputs = draw(with_kl("ppo"), optional=())
    with pytest.raises(ConfigError, match="^kl_coef"):
        gradient(prepare(with_kl("ppo"), {"kl_coef": -1.0}), driver, inputs)
    surer = prepare(with_entropy("ppo"), {"entropy_coef": -1.0})
    gradient(surer, driver, {**without(inputs, "reference_logprobs"), "entropy": driver})

    def measured(logprobs, advantages):
        return -(advantages * logprobs).sum(), {"size:sum": logprobs.numel()}

    inputs = without(inputs, "sampling_logprobs")
    found = gradient(with_kl(measured, 0.5), driver, inputs)
    assert found.metrics == {"size:sum": 15.0}
    assert found.value == pytest.approx(call(with_kl("reinforce", 0.5), driver, inputs)[0], rel=1e-5)


@for_each("name", ["topk_forward_kl", "topk_reverse_kl", "topk_jsd"])
def test_no_token_no_loss(name):
    """Entries with target -1 add exactly nothing, whatever they hold; datums may differ in their number of targets."""
    s, t = np.log(np.random.default_rng(0).dirichlet(np.ones(6), (2, 3)))
    targets = np.arange(18).reshape(3, 6)
    wide, narrow = ({"teacher_logprobs": [t[:, :k]], "target_tokens": [targets[:, :k]]} for k in (6, 1))
    both = gradient(name, [s, s[:, :1]], {key: wide[key] + narrow[key] for key in wide})
    parts = gradient(name, [s], wide), gradient(name, [s[:, :1]], narrow)
    close(both, attrs.evolve(parts[0], value=sum(p.value for p in parts), driver=[p.driver[0] for p in parts]))
    short = call(name, [s[:, :4]], {"teacher_logprobs": [t[:, :4]], "target_tokens": [targets[:, :4]]})
    targets[:, 4:] = -1
    for junk in (0.0, -50.0, np.nan, -np.inf):
        s[:, 4:], t[:, 4:] = junk, junk if np.isnan(junk) else -1.0
        value, (gradients,), _ = call(name, [s], {"teacher_logprobs": [t], "target_tokens": [targets]})
        assert value == pytest.approx(short[0], rel=1e-12)
        np.testing.assert_array_equal(gradients[:, :4], short[1][0])
        assert not gradients[:, 4:].any()
