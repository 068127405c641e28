"""Every loss reaches the service by some exact way: its value and gradient are those of the toy backend, whose model
the fake service runs too."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

import rlkit
from rlkit import _fallback, losses
from rlkit.backends.tinker import _routes
from rlkit.backends.tinker.session import Session
from rlkit.losses import with_entropy, with_kl
from rlkit.losses.prepare import prepare
from rlkit.server import _losses as served
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


@pytest.fixture(scope="module")
def plain_service():
    """One that does not run losses."""
    with FakeTinker(seed=0, config={"custom_loss_server_side": False}) as fake:
        yield fake


def connect(fake, **options):
    return rlkit.connect(
        "tinker", model="toy", base_url=fake.base_url, api_key=fake.api_key, seed=0, deadline=30.0, **options
    )


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
        assert route.kind in ("server", "client")
        assert route.why


@pytest.mark.parametrize("variant", [v for v in POLICY if v[0] not in HOSTED], ids=identity)
def test_every_loss_without_losses_on_the_service(plain_service, variant):
    """Where the service runs no losses, those that it does not host take two passes and are exact too."""
    name, settings = variant
    route = check_equal(connect(plain_service), episodes(name, settings), name, settings)
    assert (route.kind, route.calls) == ("client", ("forward", "cross_entropy"))
    assert "does not run custom losses" in route.why


@pytest.fixture
def dividing_service(monkeypatch):
    """One that is not rlkit's: its cross entropy is divided by the sum of its weights, as some servers' is."""

    def divided(lp, x):
        return -(x["weights"] * lp) / x["weights"].sum().clamp(min=1e-9), {}

    entry = served._TABLE["cross_entropy"]
    table = {**served._TABLE, "cross_entropy": attrs.evolve(entry, function=divided, elementwise=False)}
    monkeypatch.setattr(served, "_TABLE", table)
    monkeypatch.setattr("rlkit.server._training._ARCH", "another")
    with FakeTinker(seed=0, config={"custom_loss_server_side": False}) as fake:
        yield fake


@pytest.mark.parametrize("variant", [v for v in POLICY if needs(v[0])[0] == "logprobs"], ids=identity)
def test_every_loss_on_a_server_that_divides_by_weights(dividing_service, variant):
    """Is exact there, too: what has weights of its own, or a gradient for weights, goes by a loss that takes them."""
    name, settings = variant
    data = episodes(name, settings, constant=name in ("gspo", "luspo"))
    route = check_equal(connect(dividing_service), data, name, settings)
    assert "cross_entropy" not in route.calls
    assert set(route.calls) <= {"forward", "cispo", "ppo", "importance_sampling", "gspo"}


def test_a_function_on_a_server_that_divides_by_weights(dividing_service):
    route = check_equal(connect(dividing_service), episodes("ppo"), losses.ppo)
    assert route.calls == ("forward", "cispo")


def test_a_mask_is_sent_as_a_cross_entropy_anywhere(dividing_service):
    """Supervised tokens with weights of 0 and 1: every server takes them for a mask."""
    data = [rlkit.Datum.supervised([65, 66], [67, 68, 69], weights=[1.0, 0.0, 1.0])]
    with connect(dividing_service) as policy:
        assert policy.route(data, "cross_entropy").calls == ("cross_entropy",)
        assert policy.route([data[0].with_inputs(weights=0.5)], "cross_entropy").calls == ("cispo",)


def test_what_takes_the_place_of_a_weighted_cross_entropy():
    """cispo whose ratio is 1, with the weights as advantages; matrices, masks and other losses stay as they are."""
    half, mask, matrix = np.array([0.5, 1.0]), np.array([0.0, 1.0]), np.ones((2, 3)) / 2
    (part,) = [_routes.without_weights(_routes.Part("cross_entropy", {}, [{"weights": half}, None, {"weights": mask}]))]
    assert (part.loss, part.config) == ("cispo", {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0})
    assert part.arrays[0]["advantages"].tolist() == [0.5, 1.0]
    assert part.arrays[0]["logprobs"].tolist() == [0.0, 0.0]
    assert part.arrays[1] is None
    for loss, arrays in (
        ("cross_entropy", [{"weights": mask}]),
        ("cross_entropy", [{"weights": mask}, {"weights": matrix}]),
        ("cross_entropy", [{"weights": half}, {"weights": matrix}]),
        ("ppo", [{"weights": half}]),
    ):
        same = _routes.Part(loss, {}, arrays)
        assert _routes.without_weights(same) is same


def test_a_matrix_of_weights_is_warned_about_once(dividing_service):
    """It goes by no other loss."""
    data = episodes("topk_forward_kl")
    with connect(dividing_service) as policy:
        with pytest.warns(UserWarning, match="'topk_forward_kl' is sent as a cross entropy with weights of both signs"):
            policy.forward_backward(data, "topk_forward_kl").result()
        policy.forward_backward(data, "topk_forward_kl").result()  # a second warning would be an error


def test_a_matrix_of_weights_is_right_on_rlkit_s_server(service):
    with connect(service) as policy:  # a warning would be an error
        policy.forward_backward(episodes("topk_forward_kl"), "topk_forward_kl").result()


@pytest.mark.parametrize(
    ("address", "arch", "trusted"),
    [
        (None, "llama", True),
        ("https://tinker.thinkingmachines.dev/services/x", "llama", True),
        ("https://tinker.thinkingmachines.dev.evil.example", "llama", False),
        ("http://127.0.0.1:8000", "rlkit", True),
        ("http://127.0.0.1:8000", None, False),
    ],
)
def test_whose_cross_entropy_is_trusted(address, arch, trusted):
    """The hosted service's and rlkit's."""
    service = SimpleNamespace(holder=SimpleNamespace(_base_url=address))
    session = Session(service, link=None, seconds=1.0, until=0.0)
    info = SimpleNamespace(model_data=SimpleNamespace(arch=arch))
    assert session.weighs(info) is trusted


@pytest.mark.parametrize("name", [n for n in COMPOSED if "entropy" not in n.split("+")[1:]])
def test_compositions(service, name):
    """with_kl of rlkit's own losses runs on the service, at level datum."""
    loss = COMPOSED[name]
    route = check_equal(connect(service), episodes(loss), loss)
    assert route.kind == ("client" if name.startswith(("simpo", "kl_cov")) else "server")


def test_a_function_is_run_as_it_is_written(service):
    """A callable never takes a hosted loss; rlkit's own is sent, the user's runs here unless told otherwise."""
    data = episodes("ppo")

    def mine(logprobs, advantages, weights=1.0):
        return -(weights * advantages * logprobs.exp()).sum(), {"mean_logprob:mean": float(logprobs.detach().mean())}

    def traceable(logprobs, advantages, weights=1.0):
        return -(weights * advantages * logprobs.exp()).sum(), {"top:sum": logprobs.detach().max()}

    assert check_equal(connect(service), data, losses.ppo).kind == "server"
    assert check_equal(connect(service), data, mine).kind == "client"
    assert check_equal(connect(service), data, traceable).kind == "client"
    assert check_equal(connect(service, server_losses="all"), data, traceable).kind == "server"
    assert "cannot be traced" in check_equal(connect(service, server_losses="all"), data, mine).why
    assert check_equal(connect(service, server_losses="never"), data, losses.ppo).kind == "client"


def test_a_bug_that_keeps_a_loss_from_the_service_warns_once(monkeypatch):
    """With its traceback, for rlkit's own losses; those of users run here without a word."""
    monkeypatch.setattr(_fallback, "_warned", set())

    def broken(*_):
        raise TypeError("a bug")

    def mine(logprobs, advantages):
        return -(advantages * logprobs).sum()

    monkeypatch.setattr(_routes, "_same", broken)
    data, sent = episodes("ppo"), _routes.ServerLosses(None, "all", offered=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for loss in (mine, "ppo", "ppo", mine):
            assert "cannot be traced" in sent.choose(prepare(loss), data)
    (text,) = [str(each.message) for each in said]
    assert text.startswith("the loss 'ppo' on the service failed and is not used, so it runs here, in two passes.")
    assert "in broken\n" in text
    assert text.endswith("TypeError: a bug")


def test_what_hosted_losses_cannot_say_takes_another_way(service):
    """Negative weights under a minimum, and advantages that differ under gspo, are not folded."""
    data = [d.with_inputs(weights=-0.5) for d in episodes("ppo")]
    for datum in episodes("ppo"):  # one negative weight is enough
        weights = np.ones(int(datum.mask.sum()))
        weights[-1] = -0.5
        assert check_equal(connect(service), [datum.with_inputs(weights=weights)], "ppo").kind == "server"
    for name in ("ppo", "decoupled_ppo", "gspo_token", "mix"):
        own = [d.with_inputs(weights=-0.5) for d in episodes(name)]
        assert check_equal(connect(service), own, name).kind == "server"
    assert check_equal(connect(service), data, "importance_sampling").kind == "hosted"
    route = check_equal(connect(service), episodes("gspo"), "gspo")
    assert route.kind == "server"
    assert "token form" in route.why


def test_one_loss_is_sent_once(service):
    """The same loss made anew at every step is not sent again, and does not fall back."""
    data = episodes(COMPOSED["ppo+k3"])
    with connect(service) as policy:
        for _ in range(3):
            loss = with_kl("ppo", 0.3)
            assert policy.route(data, loss).kind == "server"
            policy.forward_backward(data, loss).result()
        assert sum(seen.endpoint == "create_custom_loss" for seen in service.requests) >= 1


def test_refused_upload_falls_back(caplog):
    """A service that does not take the graph leaves the loss to run here, with a warning."""
    from rlkit.testing import Fault

    data = episodes("dro")
    with FakeTinker(seed=0) as fake:
        fake.inject(Fault("400", "create_custom_loss", times=None))
        policy = connect(fake)
        with caplog.at_level("WARNING", "rlkit.tinker"):
            check_equal(policy, data, "dro")
    assert "runs here, in two passes" in caplog.text


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
    assert route.kind == "server"
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
