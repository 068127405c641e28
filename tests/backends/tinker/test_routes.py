"""Every loss reaches the service by some exact way: its value and gradient are those of the toy backend, whose model
the fake service runs too."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit import losses
from rlkit.losses import with_entropy
from rlkit.testing import FakeTinker
from tests.losses.calls import COMPOSED, NAMES, VARIANTS, example, identity, needs

pytest.importorskip("tinker", reason="needs the extra tinker")

HOSTED = {
    "cispo": ("cispo",),
    "cross_entropy": ("cross_entropy",),
    "decoupled_ppo": ("ppo",),
    "gspo": ("gspo",),
    "gspo_token": ("gspo",),
    "importance_sampling": ("importance_sampling",),
    "luspo": ("gspo",),
    "mix": ("cross_entropy", "ppo"),
    "opmd": ("cross_entropy",),
    "ppo": ("ppo",),
    "reinforce": ("cross_entropy",),
    "topr": ("cross_entropy", "cispo"),
}
POLICY = [v for v in VARIANTS if not v[0].startswith("value_")]
GD = rlkit.Adam(learning_rate=1e5, beta1=0.0, beta2=0.0, eps=1e8)  # without moments: plain gradient descent


@pytest.fixture(scope="module")
def service():
    with FakeTinker(seed=0) as fake:
        yield fake


def connect(fake):
    return rlkit.connect("tinker", model="toy", base_url=fake.base_url, api_key=fake.api_key, seed=0, deadline=30.0)


def episodes(loss, settings=None, *, constant=False):
    """Datums with several turns of the policy's own, and inputs near the toy's own logprobs."""
    rng = np.random.default_rng(11)
    names = ("weights", "mu", "target_tokens", "kl_coef", "entropy_coef")
    sizes = (4, 6, 2, 5)
    _, inputs = example(loss, rng, sizes, settings=settings, optional=names)
    data = []
    with rlkit.connect("toy", seed=0) as toy:
        for i, n in enumerate(sizes):
            tokens = rng.integers(97, 123, n + 7)
            mask = np.zeros(n + 7, bool)
            mask[rng.choice(np.arange(2, n + 6), n, replace=False)] = True
            if i % 2:  # of a pair the second: after the prompt of the first
                start = int(data[-1].mask.argmax())
                tokens[:start], mask[:] = data[-1].tokens[:start], False
                mask[[start, *rng.choice(np.arange(start + 1, n + 6), n - 1, replace=False)]] = True
            lp = toy.forward([rlkit.Datum(tokens, mask)]).result().selected[0]
            own = {k: v[i] for k, v in inputs.items() if k != "entropy"}
            for name, value in own.items():
                if name.endswith("logprobs") and np.ndim(value) == 1:
                    own[name] = np.minimum(lp + rng.normal(0, 0.2, n), -1e-3)
            if constant:
                own |= {k: float(np.mean(own[k])) for k in ("advantages", "weights") if k in own}
            data.append(rlkit.Datum(tokens, mask, own))
    return data


def trained(policy, data, loss, settings):
    """(output, logprobs before, logprobs after a step along the gradient)."""
    before = policy.forward(data).result().selected
    output = policy.forward_backward(data, loss, config=settings).result()
    policy.optim_step(GD).result()
    return output, before, policy.forward(data).result().selected


def check_equal(policy, data, loss, settings=None):
    with policy, rlkit.connect("toy", seed=0) as toy:
        route = policy.route(data, loss, config=settings)
        ours, _, after = trained(policy, data, loss, settings)
        theirs, before, expected = trained(toy, data, loss, settings)
    moved = max(np.abs(a - b).max() for a, b in zip(before, expected, strict=True))
    off = max(np.abs(a - b).max() for a, b in zip(after, expected, strict=True))
    assert moved > 1e-6
    assert off < 2e-4 * moved + 4e-7, (route, off, moved)
    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5, abs=1e-5)
    assert {k: ours.metrics[k] for k in theirs.metrics} == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-5)
    for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert np.abs(a - b).max() < 1e-5
    return route


@pytest.mark.parametrize("variant", POLICY, ids=identity)
def test_every_loss_by_name(service, variant):
    """Whatever way a named loss takes."""
    name, settings = variant
    data = episodes(name, settings, constant=name in ("gspo", "luspo"))
    route = check_equal(connect(service), data, name, settings)
    plain = not (settings.get("dual_clip") or settings.get("unified_mask") or settings.get("phi"))
    if name in HOSTED and plain:
        assert route.calls == HOSTED[name]
        assert route.kind == ("hosted" if len(HOSTED[name]) == 1 else "composed")
    else:
        assert (route.kind, route.calls) == ("client", ("forward", "cross_entropy"))
        assert route.why


@pytest.mark.parametrize("name", [n for n in COMPOSED if "entropy" not in n.split("+")[1:]])
def test_compositions(service, name):
    """with_kl, at every level: no hosted loss is one."""
    loss = COMPOSED[name]
    assert check_equal(connect(service), episodes(loss), loss).kind == "client"


def test_a_function_is_run_as_it_is_written(service):
    """A callable never takes a hosted loss; it may branch on what the model gave, and measure."""
    data = episodes("ppo")

    def mine(logprobs, advantages, weights=1.0):
        ratio = logprobs.exp() if float(logprobs.detach().mean()) > -100 else logprobs
        return -(weights * advantages * ratio).sum(), {"mean_logprob:mean": float(logprobs.detach().mean())}

    for loss in (losses.ppo, mine):
        route = check_equal(connect(service), data, loss)
        assert route.kind == "client"
        assert "as written" in route.why


def test_what_hosted_losses_cannot_say_takes_another_way(service):
    """Negative weights under a minimum, and advantages that differ under gspo, are not folded."""
    data = [d.with_inputs(weights=-0.5) for d in episodes("ppo")]
    for datum in episodes("ppo"):  # one negative weight is enough
        weights = np.ones(int(datum.mask.sum()))
        weights[-1] = -0.5
        assert check_equal(connect(service), [datum.with_inputs(weights=weights)], "ppo").kind == "client"
    for name in ("ppo", "decoupled_ppo", "gspo_token", "mix"):
        own = [d.with_inputs(weights=-0.5) for d in episodes(name)]
        assert check_equal(connect(service), own, name).kind == "client"
    assert check_equal(connect(service), data, "importance_sampling").kind == "hosted"
    route = check_equal(connect(service), episodes("gspo"), "gspo")
    assert route.kind == "client"
    assert "token form" in route.why


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        ("value_clipped", "critic"),
        ("value_huber", "critic"),
        ("stable_reinforce", "training_client"),
        (with_entropy("ppo", 0.1), "entropy_bonus"),
    ],
)
def test_what_no_route_can_express(service, loss, match):
    """What the service cannot give is refused by name, with the alternative, before anything is sent."""
    with connect(service) as policy:
        sent = len(service.requests)
        data = episodes(loss if loss in NAMES else "ppo")
        with pytest.raises(rlkit.UnsupportedError, match=match):
            policy.forward_backward(data, loss)
        with pytest.raises(rlkit.UnsupportedError, match="entropy"):
            policy.forward(data, want=("entropy",))
        assert len(service.requests) == sent


def test_the_table_of_routes_is_whole():
    """Every loss of the registry is tried above."""
    assert {name for name, _ in VARIANTS} >= set(NAMES)
    assert set(HOSTED) <= {name for name in NAMES if needs(name)[0] == "logprobs"}


def test_gspo_with_weights_that_differ(service):
    """The hosted token form is another loss where weights differ within a datum, though the advantages do not."""
    data = []
    for datum in episodes("gspo", constant=True):
        weights = np.linspace(0.5, 2.0, int(datum.mask.sum()))
        data.append(datum.with_inputs(weights=weights))
    route = check_equal(connect(service), data, "gspo")
    assert route.kind == "client"
    assert "token form" in route.why


def test_topr_with_negative_weights(service):
    """The advantage decides in which call a token counts, not the sign of its weight."""
    data = [d.with_inputs(weights=-0.5) for d in episodes("topr")]
    assert check_equal(connect(service), data, "topr").kind == "composed"


def test_mix_within_a_datum(service):
    """Tokens of the expert and of the policy in one datum, and a datum of either alone."""
    data = []
    for i, datum in enumerate(episodes("mix")):
        n = int(datum.mask.sum())
        expert = [np.arange(n) % 2, np.zeros(n), np.ones(n), np.arange(n) > 0][i % 4]
        data.append(datum.with_inputs(expert=expert.astype(float)))
    assert check_equal(connect(service), data, "mix").kind == "composed"


def test_mix_without_mu(service):
    """The share of the expert has one default, in the policy's part and in the expert's."""
    data = []
    for i, datum in enumerate(episodes("mix")):
        inputs = {k: datum.select(v) if v.ndim else v for k, v in datum.inputs.items() if k != "mu"}
        data.append(rlkit.Datum(datum.tokens, datum.mask, {**inputs, "expert": float(i % 2)}))
    assert check_equal(connect(service), data, "mix").kind == "composed"
