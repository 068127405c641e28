"""The real server by the plain SDK, its numbers against torch and peft: what the rest of these tests stands on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.server import sdk

tinker = pytest.importorskip("tinker", reason="needs the extra tinker")
pytest.importorskip("peft", reason="needs the extra local")
from tinker import types  # noqa: E402

from tests.realserver import oracle  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
PROMPT = [259, 287, 276, 20]
WAIT = 1200.0  # seconds; the first calls compile
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
LOSSES = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", CLIP),
    ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1.05}),
]
ADAM = types.AdamParams(learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-6)
# With a small eps a step is nearly the gradient's sign, and where a gradient is next to 0 rounding decides it: two
# implementations part within ten steps, sooner or later by the processor. This one is smooth there, and moves as far.
SMOOTH = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=0.1)


@pytest.fixture(scope="module")
def client():
    """``client(server)`` is a new ``tinker.ServiceClient``, closed with the tests."""
    made = []

    def make(server):
        made.append(tinker.ServiceClient(base_url=server.url, api_key="tml-any-key-is-let-in"))
        return made[-1]

    yield make
    for service in made:
        service.close("success").result(timeout=WAIT)


@pytest.fixture(scope="module")
def service(client, own):
    return client(own)


@pytest.fixture
def training(service, own):
    return service.create_lora_training_client(own.model, rank=4, seed=1).result(timeout=WAIT)


@pytest.fixture
def peft(own, tmp_path):
    """``peft(training)`` is the policy as it is, in torch."""
    numbers = iter(range(100))

    def load(training):
        number = next(numbers)
        path = training.save_weights_for_sampler(f"peft-{number}").result(timeout=WAIT).path
        return oracle.model(own.model, own.adapter(path, tmp_path / str(number)))

    return load


def batch(name, rng, lp=None, sizes=(9, 5, 13)):
    """(tokens, targets, inputs) with ratios around 1 to ``lp``."""
    data = []
    for k, n in enumerate(sizes):
        tokens, targets = rng.integers(3, 290, n), rng.integers(3, 290, n)
        if name == "cross_entropy":
            inputs = {"weights": rng.uniform(0.5, 2.0, n)}
        else:
            near = -5.0 * np.ones(n) if lp is None else lp(k, tokens, targets)
            inputs = {"logprobs": near + rng.normal(0, 0.15, n), "advantages": rng.normal(size=n)}
        data.append((tokens, targets, {key: x.astype(np.float32) for key, x in inputs.items()}))
    return data


def datums(data):
    return [types.Datum(sdk.prompt(tokens), {"target_tokens": t, **inputs}) for tokens, t, inputs in data]


def trained(training, steps=3):
    """A few steps, so that the adapter does something."""
    data = datums(batch("cross_entropy", np.random.default_rng(0)))
    for _ in range(steps):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result(timeout=WAIT)


def test_logprobs_of_a_new_adapter_are_the_base_models(own, service, training, peft):
    """B starts at zero: trainer, sampler and base agree, with torch too, to 1e-5."""
    tokens = np.random.default_rng(1).integers(3, 290, 20)
    model = peft(training)
    b = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert b
    assert not any(p.detach().any() for p in b)
    with model.disable_adapter():
        expected = oracle.logprobs(model, tokens[:-1], tokens[1:]).detach().numpy()
    data = [sdk.datum(tokens, weights=1.0)]
    found = training.forward(data, "cross_entropy").result(timeout=WAIT).loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    samplers = [
        service.create_sampling_client(base_model=own.model).result(timeout=WAIT),
        training.save_weights_and_get_sampling_client().result(timeout=WAIT),
    ]
    for sampler in samplers:
        scored = sampler.compute_logprobs(sdk.prompt(tokens)).result(timeout=WAIT)
        np.testing.assert_allclose(scored[-19:], expected, atol=1e-5)


def test_logprobs_of_a_trained_adapter(training, peft):
    """After three steps the policy is another, and torch with the saved adapter has its logprobs to 1e-5."""
    trained(training)
    data = batch("cross_entropy", np.random.default_rng(2))
    model = peft(training)
    found = training.forward(datums(data), "cross_entropy").result(timeout=WAIT)
    for (tokens, targets, _), output in zip(data, found.loss_fn_outputs, strict=True):
        expected = oracle.logprobs(model, tokens, targets).detach().numpy()
        np.testing.assert_allclose(output["logprobs"].to_numpy(), expected, atol=1e-5)
        with model.disable_adapter():
            base = oracle.logprobs(model, tokens, targets).detach().numpy()
        assert np.abs(base - expected).max() > 0.1


@pytest.mark.parametrize(("name", "config"), LOSSES)
def test_losses_of_tokens(training, peft, name, config):
    """Each token's loss is torch's to 1e-5, with ratios inside and outside of the bounds; loss:sum is their sum."""
    trained(training)
    model = peft(training)

    def near(_, tokens, targets):
        return oracle.logprobs(model, tokens, targets).detach().numpy()

    data = batch(name, np.random.default_rng(3), near)
    result = training.forward_backward(datums(data), name, config or None).result(timeout=WAIT)
    total = 0.0
    for (tokens, targets, inputs), output in zip(data, result.loss_fn_outputs, strict=True):
        expected = oracle.losses(name, config, oracle.logprobs(model, tokens, targets), inputs).detach().numpy()
        np.testing.assert_allclose(output["elementwise_loss"].to_numpy(), expected, atol=1e-5)
        total += expected.sum()
    assert result.metrics["loss:sum"] == pytest.approx(total, abs=1e-4)
    training.optim_step(ADAM).result(timeout=WAIT)


@pytest.mark.parametrize(("name", "config"), LOSSES)
@pytest.mark.parametrize("reduction", ["own", "sum"])
def test_ten_steps(real_server, client, tmp_path, name, config, reduction):
    """Ten steps on one sequence: losses and grad norms of torch's autograd and AdamW from the same adapter.

    As it is the server divides by the sum of the weights, which are one per token where the loss has none; with its
    reduction set to a sum it does not, nor by the number of sequences.
    """
    server = real_server(reduction)
    training = client(server).create_lora_training_client(server.model, rank=4, seed=2).result(timeout=WAIT)
    path = training.save_weights_for_sampler("start").result(timeout=WAIT).path
    model = oracle.model(server.model, server.adapter(path, tmp_path))
    adamw = oracle.optimizer(model, SMOOTH)
    rng = np.random.default_rng(4)
    sizes = (9,) if reduction == "own" else (9, 5)
    data = batch(name, rng, lambda _, *at: oracle.logprobs(model, *at).detach().numpy(), sizes)
    found, expected, norms = [], [], []
    for _ in range(10):
        result = training.forward_backward(datums(data), name, config or None)
        step = training.optim_step(SMOOTH).result(timeout=WAIT)
        found.append(result.result(timeout=WAIT).metrics["loss:sum"])
        norms.append(step.metrics["skyrl.ai/grad_norm"])
        adamw.zero_grad()
        losses = [oracle.losses(name, config, oracle.logprobs(model, t, to), x) for t, to, x in data]
        if reduction == "own":
            weights = data[0][2].get("weights", np.ones(9))
            (losses[0].sum() / float(weights.sum())).backward()
        else:
            sum(x.sum() for x in losses).backward()
        squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
        assert norms[-1] == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-3)
        expected.append(float(sum(x.sum() for x in losses).detach()))
        adamw.step()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert abs(found[-1] - found[0]) > 0.1


def test_samples(own, service, training):
    """Samples repeat with their seed and differ within a request; their logprobs are those of scoring them."""
    trained(training)
    sampler = training.save_weights_and_get_sampling_client().result(timeout=WAIT)
    params = types.SamplingParams(max_tokens=8, seed=7, temperature=1.0)
    first, again = (sampler.sample(sdk.prompt(PROMPT), 3, params).result(timeout=WAIT).sequences for _ in range(2))
    assert [s.tokens for s in first] == [s.tokens for s in again]
    assert len({tuple(s.tokens) for s in first}) == 3
    for sequence in first:
        assert (len(sequence.tokens), sequence.stop_reason) == (8, "length")
        whole = [*PROMPT, *sequence.tokens]
        scored = sampler.compute_logprobs(sdk.prompt(whole)).result(timeout=WAIT)
        np.testing.assert_allclose(scored[-8:], sequence.logprobs, atol=1e-5)
        data = [sdk.datum(whole, start=4, weights=1.0)]
        output = training.forward(data, "cross_entropy").result(timeout=WAIT).loss_fn_outputs[0]
        np.testing.assert_allclose(output["logprobs"].to_numpy()[-8:], sequence.logprobs, atol=1e-5)
    stop = int(first[0].tokens[3])
    params = types.SamplingParams(max_tokens=8, seed=7, stop=[stop])
    stopped = sampler.sample(sdk.prompt(PROMPT), 1, params).result(timeout=WAIT).sequences[0]
    assert stopped.tokens == first[0].tokens[: first[0].tokens.index(stop) + 1]
    assert stopped.stop_reason == "stop"


def test_resume(service, own):
    """A client made from a saved state, with its optimizer, goes on as the one that was not interrupted."""
    whole, interrupted = sdk.resumed(service, own.model)
    np.testing.assert_allclose(whole, interrupted, rtol=0.2)  # their adapters were drawn apart
    training = service.create_lora_training_client(own.model, rank=4, seed=3).result(timeout=WAIT)
    trained(training)
    path = training.save_state("middle").result(timeout=WAIT).path
    copies = [
        service.create_training_client_from_state_with_optimizer(path).result(timeout=WAIT),
        service.create_training_client_from_state(path).result(timeout=WAIT),
    ]
    data = datums(batch("cross_entropy", np.random.default_rng(5)))
    curves = []
    for client in (training, *copies):
        losses = []
        for _ in range(3):
            fb = client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=2e-2)).result(timeout=WAIT)
            losses.append(fb.result(timeout=WAIT).metrics["loss:sum"])
        curves.append(losses)
    assert curves[1] == curves[0]
    assert curves[2][0] == curves[0][0]
    assert abs(curves[2][1] - curves[0][1]) > 1e-3


@pytest.mark.parametrize(("name", "config"), [("dro", {"beta": 0.1}), ("gspo", CLIP)])
def test_what_it_refuses(training, name, config):
    """dro and gspo are refused by this server."""
    data = batch("ppo", np.random.default_rng(6))
    for _, targets, inputs in data:
        if name == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(len(targets), np.float32)
    refused = "not supported|'ppo'"  # in the result, and in the answer to the request
    with pytest.raises((tinker.APIStatusError, ValueError), match=refused):
        training.forward_backward(datums(data), name, config).result(timeout=WAIT)
