"""Every loss reaches the service by some exact way: its value and gradient are those of the toy backend, whose model
the fake service runs too."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit import losses
from rlkit.losses import with_entropy
from rlkit.testing import FakeTinker
from tests.backends.tinker.conftest import connect
from tests.each import for_each
from tests.losses.calls import COMPOSED, NAMES, VARIANTS, example, identity

pytest.importorskip("tinker", reason="needs the extra tinker")

HOSTED = {
    **{name: (name,) for name in ("cispo", "cross_entropy", "gspo", "importance_sampling", "ppo")},
    **dict.fromkeys(("gspo_token", "luspo"), ("gspo",)),
    **dict.fromkeys(("opmd", "reinforce"), ("cross_entropy",)),
    "decoupled_ppo": ("ppo",),
    "mix": ("cross_entropy", "ppo"),
    "topr": ("cross_entropy", "cispo"),
}
POLICY = {identity(v): v for v in VARIANTS if not v[0].startswith("value_")}
# with_kl, at every level: no hosted loss is one
POLICY |= {name: (COMPOSED[name], {}) for name in COMPOSED if "entropy" not in name.split("+")[1:]}
GD = rlkit.Adam(learning_rate=1e5, beta1=0.0, beta2=0.0, eps=1e8)  # without moments: plain gradient descent


@pytest.fixture(scope="module")
def service():
    with FakeTinker(seed=0) as fake:
        yield fake


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


@pytest.mark.parametrize(("name", "settings"), POLICY.values(), ids=POLICY)
def test_every_loss_by_name(service, name, settings):
    """Whatever way a named loss takes, or a composition."""
    data = episodes(name, settings, constant=name in ("gspo", "luspo"))
    route = check_equal(connect(service), data, name, settings)
    plain = not (settings.get("dual_clip") or settings.get("unified_mask") or settings.get("phi"))
    if name in HOSTED and plain:
        assert route.calls == HOSTED[name]
        assert route.kind == ("hosted" if len(HOSTED[name]) == 1 else "composed")
    else:
        assert (route.kind, route.calls) == ("client", ("forward", "cross_entropy"))
        assert route.why


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


def weighted(name, *weights, constant=False):
    """Episodes whose weights run from the first to the last of these."""
    data = episodes(name, constant=constant)
    return [d.with_inputs(weights=np.linspace(weights[0], weights[-1], int(d.mask.sum()))) for d in data]


def mixed(*, per_token):
    """Tokens of the expert and of the policy in one datum, and either alone; else whole datums and default shares."""
    data = []
    for i, datum in enumerate(episodes("mix")):
        n = int(datum.mask.sum())
        inputs = {k: datum.select(v) if v.ndim else v for k, v in datum.inputs.items() if k != "mu" or per_token}
        expert = [np.arange(n) % 2, np.zeros(n), np.ones(n), np.arange(n) > 0][i % 4] if per_token else i % 2
        data.append(rlkit.Datum(datum.tokens, datum.mask, {**inputs, "expert": np.asarray(expert, float)}))
    return data


SPECIAL = [
    *(
        ("client", name, lambda name=name: weighted(name, -0.5))
        for name in ("ppo", "decoupled_ppo", "gspo_token", "mix")
    ),
    *(("client", "ppo", lambda i=i: weighted("ppo", 1.0, -0.5)[i : i + 1]) for i in range(4)),  # one is enough
    ("hosted", "importance_sampling", lambda: weighted("ppo", -0.5)),
    # The hosted token form is another loss where advantages or weights differ within a datum.
    ("client", "gspo", lambda: episodes("gspo")),
    ("client", "gspo", lambda: weighted("gspo", 0.5, 2.0, constant=True)),
    # The advantage decides in which call a token counts, not the sign of its weight.
    ("composed", "topr", lambda: weighted("topr", -0.5)),
    ("composed", "mix", lambda: mixed(per_token=True)),
    ("composed", "mix", lambda: mixed(per_token=False)),  # mu has one default, in the policy's part and the expert's
]


@for_each(("kind", "loss", "make"), SPECIAL)
def test_what_decides_on_the_way(service, kind, loss, make):
    """Hosted losses cannot say everything: weights below 0 under a minimum, or advantages that differ under gspo."""
    route = check_equal(connect(service), make(), loss)
    assert route.kind == kind
    assert loss != "gspo" or "token form" in route.why


REFUSED = [("value_clipped", "critic"), ("value_huber", "critic"), ("stable_reinforce", "training_client")]


@for_each(("loss", "match"), [*REFUSED, (with_entropy("ppo", 0.1), "entropy_bonus")])
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
