"""Programs for the plain SDK run on the fake, and on a server over a backend."""

from __future__ import annotations

import functools

import pytest

import rlkit
from tests.server import sdk

tinker = pytest.importorskip("tinker")
from rlkit.server import serve  # noqa: E402
from rlkit.testing import FakeTinker  # noqa: E402


@pytest.fixture(scope="module", params=["fake", "server"])
def service(request, tmp_path_factory):
    if request.param == "fake":
        with FakeTinker(seed=0) as fake:
            yield fake.service_client()
        return
    folder = tmp_path_factory.mktemp("saves")
    connect = functools.partial(rlkit.connect, "toy", folder=folder)
    with FakeTinker(), serve(connect, names=("toy",), folder=folder, seed=0) as server:  # the fake lends its tokenizer
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-anything")
        yield client
        client.close("success").result(timeout=60)


def test_supervised(service):
    """Cross entropy falls to almost nothing, and the sampler says the line."""
    training, losses = sdk.supervised(service, "toy")
    assert losses[0] > 20
    assert losses[-1] < 0.5
    tokenizer = training.get_tokenizer()
    sampler = training.save_weights_and_get_sampling_client().result()
    params = tinker.types.SamplingParams(max_tokens=19, temperature=0.0)
    found = sampler.sample(sdk.prompt(tokenizer.encode("the")), 1, params).result().sequences[0]
    assert tokenizer.decode(found.tokens) == " cat sat on the mat"


def test_grpo(service):
    """The rewarded letter becomes frequent."""
    rewards = sdk.grpo(service, "toy")
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5


def test_resume(service):
    """A run that was saved and resumed goes on exactly as one that was not."""
    whole, interrupted = sdk.resumed(service, "toy")
    assert whole == interrupted
    assert whole[-1] < whole[0]


def test_custom_loss(service):
    losses = sdk.custom(service, "toy")
    assert losses[-1] < 0.2 * losses[0]


def test_several_clients_at_once(tmp_path):
    """Three clients with a model each train beside each other, and none sees another's."""
    connect = functools.partial(rlkit.connect, "toy", folder=tmp_path)
    with serve(connect, names=("toy",)) as server:
        clients = [tinker.ServiceClient(base_url=server.url, api_key="tml-anything") for _ in range(3)]
        models = [c.create_lora_training_client("toy").result() for c in clients]
        data = [[sdk.datum([65 + k] * 6, weights=1.0)] for k in range(3)]
        for _ in range(10):
            fbs = [m.forward_backward(d, "cross_entropy") for m, d in zip(models, data, strict=True)]
            steps = [m.optim_step(tinker.types.AdamParams(learning_rate=0.1)) for m in models]
            losses = [fb.result().metrics["loss:sum"] for fb in fbs]
            _ = [step.result() for step in steps]
        assert max(losses) < 1.0
        crossed = models[0].forward(data[1], "cross_entropy").result().metrics["loss:sum"]
        assert crossed > 5.0
        for client in clients:
            client.close("success").result(timeout=60)
