"""Laws that relate the losses to each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.each import for_each
from tests.losses.calls import ALL, NAMES, PAIRS, call, example
from tests.properties import examples

few = examples(30)
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=3)

# Losses whose gradient on-policy is that of importance sampling, and a factor; the settings switch off what is not
# part of the policy gradient.
ON_POLICY = [
    ("reinforce", {}, 1.0),
    ("ppo", {}, 1.0),
    ("ppo", {"dual_clip": 3.0}, 1.0),
    ("decoupled_ppo", {}, 1.0),
    ("cispo", {}, 1.0),
    ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1, "unified_mask": True}, 1.0),
    ("gspo_token", {}, 1.0),
    ("sapo", {}, 1.0),
    ("vespo", {}, 1.0),
    ("dppo_tv", {}, 1.0),
    ("dppo_kl", {}, 1.0),
    ("dro", {}, 1.0),
    ("topr", {}, 1.0),
    ("sppo", {}, 1.0),
    ("rec", {}, 1.0),
    ("rec", {"clip_mode": "ring", "weight": "importance_sampling", "regularizer": "k2", "regularizer_coef": 1.0}, 1.0),
    ("opsm", {}, 1.0),
    ("opmd", {"tau": 3.0}, 0.25),
    ("clip_cov", {"fraction": 0.0}, 1.0),
    ("kl_cov", {}, 1.0),
]
ONE_ADVANTAGE = [("gspo", {}), ("luspo", {}), ("gmpo", {})]


@st.composite
def batches(draw, sizes=LENGTHS, spread=1.0, constant=False):
    """logprobs, and sampling_logprobs, advantages and weights, one array per datum."""

    def floats(n, low, high):
        return np.array(draw(st.lists(st.floats(low, high, width=32), min_size=n, max_size=n)), float)

    lengths = draw(sizes)
    lp = [floats(n, -4, -0.125) for n in lengths]
    inputs = {
        "sampling_logprobs": [x - floats(x.size, -spread, spread) if spread else x for x in lp],
        "advantages": [np.full(n, floats(1, -3, 3)[0]) if constant else floats(n, -3, 3) for n in lengths],
        "weights": [floats(n, 0, 2) for n in lengths],
    }
    return lp, inputs


def same(a, b, tolerance=1e-9):
    """Both have the same value and gradient."""
    np.testing.assert_allclose(a[0], b[0], rtol=tolerance, atol=tolerance)
    same_gradient(a, b, tolerance)


def same_gradient(a, b, tolerance=1e-9, factor=1.0):
    for x, y in zip(a[1], b[1], strict=True):
        np.testing.assert_allclose(x, factor * y, rtol=tolerance, atol=tolerance)


def for_loss(name, inputs):
    if name in ("reinforce", "opmd"):
        return {k: v for k, v in inputs.items() if k != "sampling_logprobs"}
    if name == "decoupled_ppo":
        return {**inputs, "old_logprobs": inputs["sampling_logprobs"]}
    return inputs


@pytest.mark.parametrize(("name", "options", "factor"), ON_POLICY)
@few
@given(batch=batches(spread=0))
def test_on_policy_gradient(name, options, factor, batch):
    """Where policy and sampling policy are one, every policy loss has the gradient of importance sampling."""
    lp, inputs = batch
    expected = call("importance_sampling", lp, inputs)
    same_gradient(call(name, lp, for_loss(name, inputs), options), expected, factor=factor)


@pytest.mark.parametrize(("name", "options"), ONE_ADVANTAGE)
@few
@given(batch=batches(spread=0, constant=True))
def test_on_policy_gradient_of_a_whole_sequence(name, options, batch):
    """So do the sequence losses, where a datum has one advantage and one weight."""
    lp, inputs = batch
    inputs["weights"] = [w[0] for w in inputs["weights"]]
    same_gradient(call(name, lp, inputs, options), call("importance_sampling", lp, inputs))


@few
@given(batch=batches(spread=0))
def test_on_policy_gradient_of_a_mixture(batch):
    """The policy's share of ``mix`` is (1 - mu) times importance sampling, the expert's mu times cross entropy."""
    lp, inputs = batch
    n = len(lp)
    own = call("mix", lp, {**inputs, "expert": [0.0] * n, "mu": [0.25] * n})
    same_gradient(own, call("importance_sampling", lp, inputs), factor=0.75)
    expert = call("mix", lp, {**inputs, "expert": [1.0] * n, "mu": [0.25] * n})
    plain = call("cross_entropy", lp, {"weights": inputs["weights"]})
    assert expert[0] == pytest.approx(0.25 * plain[0])
    same_gradient(expert, plain, factor=0.25)


ONE = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}


@for_each(
    ("name", "options"),
    [
        ("sppo", ONE),
        ("cispo", {**ONE, "unified_mask": True}),
        ("rec", {**ONE, "clip_mode": "one-side"}),
        ("rec", {**ONE, "clip_mode": "two-side"}),
        ("dppo_tv", {"divergence_low": 0.0, "divergence_high": 0.0}),
        ("dppo_kl", {"divergence_low": 0.0, "divergence_high": 0.0}),
        ("opsm", {"delta": 0.0}),
    ],
)
def test_bounds_are_inside(name, options):
    """A token that stands exactly on a bound is still trained."""
    lp, a = np.array([-1.0, -2.0, -0.5]), np.array([1.0, -2.0, 0.0])
    gradient = call(name, [lp], {"sampling_logprobs": [lp], "advantages": [a]}, options)[1][0]
    np.testing.assert_allclose(gradient, -a)


@pytest.mark.parametrize(("distance", "sign", "bound"), [(-0.5, 1.0, "ring_low"), (0.5, -1.0, "ring_high")])
def test_the_bounds_of_a_ring_are_inside(distance, sign, bound):
    """Beyond the clip bounds a ring keeps tokens of one sign, from its own bound on."""
    lp, a = np.array([-1.0, -2.0, -0.5]), sign * np.array([1.0, 2.0, 0.5])
    inputs = {"sampling_logprobs": [lp - distance], "advantages": [a]}
    on = torch.tensor(distance, dtype=torch.float64).exp().item()
    for beyond, kept in ((0.0, True), (1e-6 if bound == "ring_high" else -1e-6, False)):
        options = {"clip_mode": "ring", f"{bound}_threshold": on + beyond}
        gradient = call("rec", [lp], inputs, options)[1][0]
        np.testing.assert_allclose(gradient, -a if kept else 0 * a)


def test_a_divergence_on_its_bound_is_inside():
    """dppo_kl keeps a token whose binary divergence is the bound itself, not one just beyond it, on both sides."""
    q, p = np.log([0.5, 0.5]), np.log([0.75, 0.25])
    old, new = torch.tensor(q), torch.tensor(p)  # by the same operations, so that the bound is met to the last digit
    exact = (old.exp() * (old - new) - old.expm1() * ((-old.expm1()).log() - (-new.expm1()).log())).tolist()
    for i, advantage in enumerate((1.0, -1.0)):
        inputs = {"sampling_logprobs": [q[i : i + 1]], "advantages": [np.array([advantage])]}
        for key in ("divergence_low", "divergence_high"):
            mine = key == ("divergence_high" if i == 0 else "divergence_low")
            for bound, kept in ((exact[i], True), (exact[i] * 1.001, True), (exact[i] * 0.999, not mine)):
                options = {"divergence_low": 9.0, "divergence_high": 9.0, key: float(bound)}
                gradient = call("dppo_kl", [p[i : i + 1]], inputs, options)[1][0]
                assert bool(gradient.any()) == kept, (i, key, bound)


@few
@given(batch=batches())
def test_ppo_without_bounds_is_importance_sampling(batch):
    lp, inputs = batch
    free = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
    same(call("ppo", lp, inputs, free), call("importance_sampling", lp, inputs))
    old = {**inputs, "old_logprobs": [x - 0.3 for x in lp]}
    same(call("decoupled_ppo", lp, old, free), call("importance_sampling", lp, inputs))


@few
@given(batch=batches(spread=0.125))
def test_ppo_within_its_bounds_is_importance_sampling(batch):
    """No ratio leaves [0.8, 1.2] here."""
    lp, inputs = batch
    expected = call("importance_sampling", lp, inputs)
    for name, options in (("ppo", {}), ("ppo", {"dual_clip": 1.25}), ("clip_cov", {"fraction": 0.0})):
        same(call(name, lp, inputs, options), expected)
    same_gradient(call("cispo", lp, inputs, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}), expected)


@few
@given(batch=batches(), cap=st.floats(1.25, 4))
def test_dual_clip_only_lowers_the_loss(batch, cap):
    """A far bound changes nothing; a near one cuts only where the advantage is negative, to -c A."""
    lp, inputs = batch
    plain = call("ppo", lp, inputs)
    same(call("ppo", lp, inputs, {"dual_clip": 1e9}), plain)
    assert call("ppo", lp, inputs, {"dual_clip": cap})[0] <= plain[0] + 1e-12
    inputs["advantages"] = [np.abs(a) for a in inputs["advantages"]]
    same(call("ppo", lp, inputs, {"dual_clip": cap}), call("ppo", lp, inputs))


@few
@given(batch=batches())
def test_unified_mask_keeps_what_ppo_trains(batch):
    """CISPO with the mask has a gradient exactly where PPO has one."""
    lp, inputs = batch
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    ppo, cispo = call("ppo", lp, inputs, bounds), call("cispo", lp, inputs, {**bounds, "unified_mask": True})
    for x, y in zip(cispo[1], ppo[1], strict=True):
        assert ((x != 0) == (y != 0)).all()


@few
@given(batch=batches(constant=True))
def test_gspo_and_its_token_form(batch):
    """They have one value always, and one gradient where a datum has one advantage and one weight; luspo is gspo."""
    lp, inputs = batch
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    sequence, token = call("gspo", lp, inputs, bounds), call("gspo_token", lp, inputs, bounds)
    assert sequence[0] == pytest.approx(token[0], abs=1e-9)
    same(call("luspo", lp, inputs, bounds), sequence)
    inputs["weights"] = [w[0] for w in inputs["weights"]]
    same(call("gspo", lp, inputs, bounds), call("gspo_token", lp, inputs, bounds))


@few
@given(batch=batches(sizes=st.lists(st.just(1), min_size=1, max_size=4)))
def test_sequences_of_one_token(batch):
    """With one token, GSPO in each form is PPO, and so is OPSM with a far threshold."""
    lp, inputs = batch
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    expected = call("ppo", lp, inputs, bounds)
    for name in ("gspo", "gspo_token", "luspo"):
        same(call(name, lp, inputs, bounds), expected)
    same(call("opsm", lp, inputs, {**bounds, "delta": 1e3}), expected)


@few
@given(batch=batches())
def test_opsm_between_its_limits(batch):
    """With a far threshold nothing is left out; without tolerance, of a drifted sequence every token with A < 0."""
    lp, inputs = batch
    same(call("opsm", lp, inputs, {"delta": 1e3}), call("ppo", lp, inputs))
    good = {**inputs, "advantages": [np.maximum(a, 0) for a in inputs["advantages"]]}
    drifted = [q - 0.01 - abs(x - q) for x, q in zip(lp, inputs["sampling_logprobs"], strict=True)]
    same(call("opsm", drifted, inputs, {"delta": 0.0}), call("ppo", drifted, good))
    nearer = [q + 0.01 + abs(x - q) for x, q in zip(lp, inputs["sampling_logprobs"], strict=True)]
    same(call("opsm", nearer, inputs, {"delta": 0.0}), call("ppo", nearer, inputs))


@few
@given(batch=batches())
def test_weights_fold_into_advantages(batch):
    """Where a loss is homogeneous in the advantages, weights >= 0 may be multiplied into them."""
    lp, inputs = batch
    folded = {
        "sampling_logprobs": inputs["sampling_logprobs"],
        "advantages": [a * w for a, w in zip(inputs["advantages"], inputs["weights"], strict=True)],
    }
    for name in ("importance_sampling", "ppo", "cispo", "gspo", "gspo_token", "reinforce", "opmd", "topr", "sapo"):
        if name in ("sapo", "topr"):  # a weight of 0 takes the sign away that decides between two branches
            assume(all((w > 0).all() for w in inputs["weights"]))
        same(call(name, lp, for_loss(name, inputs)), call(name, lp, for_loss(name, folded)), 1e-7)


def test_dro_does_not_fold():
    """Its pull is not multiplied by the advantage: 1/2 of everything is not the loss of half the advantage."""
    lp, q, a = [np.array([-1.0])], [np.array([-3.0])], [np.array([1.0])]
    weighted = call("dro", lp, {"sampling_logprobs": q, "advantages": a, "weights": [0.5]}, {"beta": 0.5})
    folded = call("dro", lp, {"sampling_logprobs": q, "advantages": [0.5 * a[0]]}, {"beta": 0.5})
    assert weighted[0] == 1.0
    assert folded[0] == 1.5


@for_each("title", ALL)
def test_loss_is_linear_in_the_weights(title):
    """Weights multiply every term: losses of two weightings add up to that of their sum, gradients too.

    So with weights of 1 / N a loss is a mean over N tokens, with 1 / n of each datum one over sequences of token means.
    """
    driver, inputs = example(ALL[title], np.random.default_rng(11))
    rng = np.random.default_rng(12)
    other = {**inputs, "weights": [rng.uniform(0, 1, w.shape) for w in inputs["weights"]]}
    both = {**inputs, "weights": [a + b for a, b in zip(inputs["weights"], other["weights"], strict=True)]}
    a, b, c = (call(ALL[title], driver, x) for x in (inputs, other, both))
    assert a[0] + b[0] == pytest.approx(c[0], rel=1e-9)
    for x, y, z in zip([*a[1], *a[2]], [*b[1], *b[2]], [*c[1], *c[2]], strict=True):
        np.testing.assert_allclose(x + y, z, rtol=1e-9, atol=1e-12)
    assert any(x.any() for x in a[1])
    plain = call(ALL[title], driver, {k: v for k, v in inputs.items() if k != "weights"})
    for weights in ([0.125] * len(driver), [np.full(len(x), 0.125) for x in driver]):
        mean = call(ALL[title], driver, {**inputs, "weights": weights})
        assert mean[0] == pytest.approx(0.125 * plain[0])
        for x, y in zip([*mean[1], *mean[2]], [*plain[1], *plain[2]], strict=True):
            np.testing.assert_allclose(x, 0.125 * y, rtol=1e-9)


@few
@given(seed=st.integers(0, 99), beta=st.floats(0.125, 2))
def test_swapped_pairs(seed, beta):
    """DPO: swapping a pair changes the loss by the margin. Robust DPO is DPO on average over swaps."""
    driver, inputs = example("dpo", np.random.default_rng(seed), sizes=(3, 4), optional=())
    back = {k: v[::-1] for k, v in inputs.items()}

    def value(x, others, **options):
        return call("dpo", x, others, {"beta": beta, **options})[0]

    ref = inputs["reference_logprobs"]
    margin = beta * ((driver[0] - ref[0]).sum() - (driver[1] - ref[1]).sum())
    assert value(driver[::-1], back) - value(driver, inputs) == pytest.approx(margin)
    noisy = {"form": "robust", "label_smoothing": 0.2}
    mixed = 0.8 * value(driver, inputs, **noisy) + 0.2 * value(driver[::-1], back, **noisy)
    assert mixed == pytest.approx(value(driver, inputs))


@pytest.mark.parametrize(("name", "options"), [("simpo", {}), ("orpo", {}), ("dpo", {"form": "ipo"})])
def test_length_does_not_count(name, options):
    """Losses of mean logprobs do not change when the rejected answer is written twice."""
    driver, inputs = example(name, np.random.default_rng(0), sizes=(3, 4), optional=())
    twice = {k: [v[0], np.tile(v[1], 2)] for k, v in inputs.items()}
    assert call(name, [driver[0], np.tile(driver[1], 2)], twice, options)[0] == pytest.approx(
        call(name, driver, inputs, options)[0]
    )


@pytest.mark.parametrize("name", PAIRS)
def test_weight_of_a_pair_is_the_chosen_ones(name):
    """The rejected's weight is of no account; a weight per token counts as its mean."""
    driver, inputs = example(name, np.random.default_rng(0), sizes=(3, 4), optional=())
    plain = call(name, driver, inputs)
    for w in (0.5, np.array([0.25, 0.5, 0.75])):
        weighted = call(name, driver, {**inputs, "weights": [w, np.full(4, 9.0)]})
        assert weighted[0] == pytest.approx(0.5 * plain[0])
        same_gradient(weighted, plain, factor=0.5)


@few
@given(seed=st.integers(0, 99))
def test_order_of_the_batch(seed):
    """KL-Cov does not care for the order of the datums; with fraction 0 it is importance sampling."""
    rng = np.random.default_rng(seed)
    driver, inputs = example("kl_cov", rng)
    order = rng.permutation(len(driver))
    plain = call("kl_cov", driver, inputs, {"fraction": 0.3})
    moved = call(
        "kl_cov", [driver[i] for i in order], {k: [v[i] for i in order] for k, v in inputs.items()}, {"fraction": 0.3}
    )
    assert moved[0] == pytest.approx(plain[0])
    same_gradient(moved, (0, [plain[1][i] for i in order]))
    same(call("kl_cov", driver, inputs, {"fraction": 0.0}), call("importance_sampling", driver, inputs))


def left_out(fraction, seed, n=40):
    """How many tokens of one batch of candidates clip_cov leaves out, and which."""
    lp = np.linspace(-3, -1, n)
    advantages = np.linspace(-1, 3, n)
    options = {"fraction": fraction, "seed": seed, "cov_low": -1e9, "cov_high": 1e9}
    inputs = {"sampling_logprobs": [lp[:15], lp[15:]], "advantages": [advantages[:15], advantages[15:]]}
    gradients = call("clip_cov", [lp[:15], lp[15:]], inputs, options)[1]
    gone = np.flatnonzero(np.concatenate(gradients) == 0)
    assert (advantages[gone] != 0).all()
    return set(gone.tolist())


def test_draw_of_clip_cov():
    """max(1, floor(fraction N)) of the candidates are left out, drawn by the seed alone and over the whole batch."""
    assert [len(left_out(f, 0)) for f in (0.0, 1e-6, 0.06, 0.5, 1.0)] == [0, 1, 2, 20, 40]
    assert left_out(0.2, 7) == left_out(0.2, 7)
    draws = [left_out(0.2, seed) for seed in range(60)]
    assert len({frozenset(draw) for draw in draws}) > 50
    assert len(set().union(*draws)) == 40


def test_candidates_of_clip_cov():
    """Only tokens with a covariance strictly between the bounds, and which PPO has not clipped, are left out."""
    lp = np.array([-2.0, -0.5, -1.5])
    a = np.array([-1.0, 3.0, 0.5])
    c = (a - a.mean()) * (lp - lp.mean())

    def zeros(low, high, sampling=lp):
        options = {"fraction": 1.0, "cov_low": low, "cov_high": high}
        gradient = call("clip_cov", [lp], {"sampling_logprobs": [sampling], "advantages": [a]}, options)[1][0]
        return (gradient == 0).tolist()

    assert c.argmax() == 1
    assert zeros(c[0] + 1e-9, c[1] + 1e-9) == [False, True, False]
    assert zeros(c[1] + 1e-9, 99.0) == [False, False, False]
    assert zeros(-99.0, c[0] - 1e-9) == [False, False, True]
    far = lp - np.array([0.0, 1.0, 0.0])  # the second token is clipped: ratio e, A > 0
    plain = call("ppo", [lp], {"sampling_logprobs": [far], "advantages": [a]})
    options = {"fraction": 1.0, "cov_low": c[0] + 1e-9, "cov_high": 99.0}
    same(call("clip_cov", [lp], {"sampling_logprobs": [far], "advantages": [a]}, options), plain)


def test_bounds_of_clip_cov_are_outside():
    """A token whose covariance is a bound itself stays."""
    lp, a = np.array([-2.0, -0.5, -0.5]), np.array([-1.0, 3.0, 1.0])  # covariances 2, 1, 0
    for low, high, left in ((2.0, 9.0, []), (1.0, 9.0, [0]), (0.5, 2.0, [1]), (-0.5, 1.0, [2]), (0.0, 2.0, [1])):
        options = {"fraction": 1.0, "cov_low": low, "cov_high": high}
        gradient = call("clip_cov", [lp], {"sampling_logprobs": [lp], "advantages": [a]}, options)[1][0]
        assert np.flatnonzero(gradient == 0).tolist() == left


def test_tokens_of_kl_cov():
    """max(1, floor(fraction N)) tokens, those with the largest covariance, are pulled."""
    n = 10
    lp, a = np.linspace(-3, -1, n), np.linspace(-1, 3, n) ** 3
    q = lp - 0.1
    c = (a - a.mean()) * (lp - lp.mean())
    inputs = {"sampling_logprobs": [q], "advantages": [a]}
    plain = call("importance_sampling", [lp], inputs)[1][0]
    for fraction, count in ((1e-6, 1), (0.19, 1), (0.2, 2), (0.55, 5), (1.0, 10)):
        pulled = call("kl_cov", [lp], inputs, {"fraction": fraction, "coef": 2.0})[1][0] - plain
        assert set(np.flatnonzero(np.abs(pulled) > 1e-9)) == set(np.argsort(-c)[:count])
        np.testing.assert_allclose(pulled[np.abs(pulled) > 1e-9], 2.0)


def test_huber_meets_its_limits():
    """With a far bound Huber's loss is half the square, with a near one delta times the distance."""
    v, r = [np.array([1.0, -2.0, 0.5])], [np.array([0.0, 1.0, 0.25])]
    assert call("value_huber", v, {"returns": r}, {"delta": 1e6})[0] == pytest.approx(0.5 * (1 + 9 + 0.0625))
    assert call("value_huber", v, {"returns": r}, {"delta": 1e-6})[0] == pytest.approx(4.25e-6, rel=1e-5)
    free = call("value_clipped", v, {"returns": r, "old_values": [np.zeros(3)]}, {"clip": 1e6})
    same(free, call("value_huber", v, {"returns": r}, {"delta": 1e6}))


def test_vespo_fades():
    """A sequence that is far off either way has next to no gradient left."""
    lp, a = [np.full(20, -1.0)], [np.ones(20)]
    sizes = [
        np.abs(call("vespo", lp, {"sampling_logprobs": [lp[0] + shift], "advantages": a})[1][0]).max()
        for shift in (-2.0, -0.5, 0.0, 0.5, 2.0)
    ]
    assert sizes[2] == 1.0
    assert sizes[0] <= sizes[1] < 1e-3 > sizes[3] >= sizes[4]
    assert math.isfinite(sum(sizes))


@for_each("name", NAMES)
def test_one_number_is_the_same_number_for_each_token(name):
    """An input () means its value at every token, in value and gradient."""
    driver, inputs = example(name, np.random.default_rng(3))
    spread = {k: v for k, v in inputs.items() if k in ("advantages", "weights", "returns")}
    single = inputs | {k: [float(x.mean()) for x in v] for k, v in spread.items()}
    full = inputs | {k: [np.full_like(x, x.mean()) for x in v] for k, v in spread.items()}
    value, gradients, _ = call(name, driver, single)
    expected, others, _ = call(name, driver, full)
    assert value == pytest.approx(expected, rel=1e-12)
    for a, b in zip(gradients, others, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


def test_gmpo_takes_the_upper_bound_for_a_zero_advantage():
    """A token with A = 0 counts in the geometric mean, clipped from above."""
    inputs = {"sampling_logprobs": [np.full(2, -3.0)], "advantages": [np.array([0.0, -1.0])]}
    driver = [np.array([-1.0, -3.0])]  # ratios e^2, beyond the bound, and 1
    value, _, _ = call("gmpo", driver, inputs, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0})
    assert value == pytest.approx(math.sqrt(2.0))


def test_an_advantage_of_the_threshold_counts_as_bad():
    """TOPR bounds its ratio; beyond the threshold the token has a weight of 1."""
    inputs = {"sampling_logprobs": [np.full(2, -1.0)], "advantages": [np.array([0.5, 0.75])]}
    _, (gradient,), _ = call("topr", [np.full(2, -1.0 - np.log(2))], inputs, {"threshold": 0.5})
    np.testing.assert_allclose(gradient, [-0.25, -0.75])


def test_sppo_has_two_bounds():
    """Bounds that are not each other's inverse: each drops what lies beyond it, and nothing else."""
    ratios = np.log([0.55, 0.65, 1.35, 1.45])
    inputs = {"sampling_logprobs": [np.full(4, -2.0)], "advantages": [np.ones(4)]}
    _, (gradient,), _ = call("sppo", [ratios - 2.0], inputs, {"clip_low_threshold": 0.6, "clip_high_threshold": 1.4})
    np.testing.assert_array_equal(gradient, [0.0, -1.0, -1.0, 0.0])
