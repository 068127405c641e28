"""Saving and loading: exact, by names that are used once, and listed."""

from __future__ import annotations

import concurrent.futures
import functools
import json

import numpy as np
import pytest

import rlkit
from rlkit.server import BackendModels, Service
from rlkit.testing import FakeTinker
from tests.server.sdk import datum, prompt
from tests.server.test_protocol import Client

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

DATA = [datum(list(b"hello world"), weights=1.0), datum(list(b"12 34"), weights=0.5)]


@pytest.fixture
def fake():
    with FakeTinker(seed=0) as fake:
        yield fake


def trained(training, steps):
    losses = []
    for _ in range(steps):
        fb = training.forward_backward(DATA, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.03)).result()
        losses.append(fb.result().metrics["loss:sum"])
    return losses


def state(fake, training):
    return fake.service._state.runs[training.model_id].model._weights.state


def test_with_and_without_optimizer(fake):
    """With it a new client goes on bit for bit; without it weights are the same and the moments start anew."""
    service = fake.service_client()
    training = service.create_lora_training_client("toy", rank=4).result()
    trained(training, 3)
    path = training.save_state("a", ttl_seconds=3600, user_metadata={"k": "v"}).result().path
    assert path == f"tinker://{training.model_id}/weights/a"
    expected = trained(training, 3)
    whole = service.create_training_client_from_state_with_optimizer(path).result()
    weights = service.create_training_client_from_state(path).result()
    assert state(fake, whole).steps == 3
    assert not state(fake, weights).second.any()
    np.testing.assert_array_equal(state(fake, whole).value, state(fake, weights).value)
    assert whole.get_info().lora_rank == 4
    assert trained(whole, 3) == expected
    fresh = trained(weights, 3)
    assert fresh[0] == expected[0]
    assert fresh[1] != expected[1]


def test_saved_states_are_frozen(fake):
    """A save in flight has the state of its place in the order, whatever follows."""
    service = fake.service_client()
    training = service.create_lora_training_client("toy").result()
    training.forward_backward(DATA, "cross_entropy")
    save = training.save_state("pending")  # a gradient is accumulated: it is not part of a state
    step = training.optim_step(types.AdamParams(learning_rate=0.1))
    after = training.save_state("after")
    step.result()
    trained(training, 2)
    clients = [service.create_training_client_from_state(f.result().path).result() for f in (save, after)]
    base = fake.service._state.models._base
    np.testing.assert_array_equal(state(fake, clients[0]).value, base)
    assert np.abs(state(fake, clients[1]).value - base).max() == pytest.approx(0.1, rel=1e-3)


def test_other_clients_states(fake):
    """A path can be loaded by a later session."""
    first = fake.service_client()
    training = first.create_lora_training_client("toy").result()
    trained(training, 2)
    path = training.save_state("x").result().path
    expected = trained(training, 2)
    first.close("success").result()
    again = fake.service_client().create_training_client_from_state_with_optimizer(path).result()
    assert trained(again, 2) == expected


def test_sampler_weights_are_not_trained_from(fake):
    service = fake.service_client()
    training = service.create_lora_training_client("toy").result()
    sampler, full = (f("a").result().path for f in (training.save_weights_for_sampler, training.save_state))
    with pytest.raises(tinker.BadRequestError, match="can not be trained|cannot be trained"):
        service.create_training_client_from_state(sampler).result()
    with pytest.raises(tinker.BadRequestError, match="saved for training"):
        service.create_sampling_client(model_path=full).result()


def test_names(fake):
    """Are used once, unless overwriting is asked for; hostile ones are refused."""
    client = Client(fake.service, {"x-api-key": fake.api_key})
    model = client.model()

    def save(seq_id, **options):
        status, answer = client.post("save_weights", {"model_id": model, "seq_id": seq_id, **options})
        return client.result(answer["request_id"])[1] if status == 200 else (status, answer["detail"])

    assert save(1, path="a")["path"] == f"tinker://{model}/weights/a"
    assert save(2, path="a")[0] == 409
    assert save(2, path="a", overwrite=True)["path"].endswith("/a")
    for name in ("", ".", "..", "../a", "/etc/x", "a/b", "a\0b", "a b", "a" * 101, ".hidden", "ä", "a\n"):
        status, message = save(3, path=name)
        assert status == 400, name
        assert "expected 1 to 100 letters" in message
    assert save(3, path="b", ttl_seconds=60)[0] == 400
    assert save(3)["path"].endswith("/weights/000003")


def test_a_save_that_fails_gives_its_name_back(fake, monkeypatch):
    client = Client(fake.service, {"x-api-key": fake.api_key})
    model = client.model()
    run = fake.service._state.runs[model]
    with monkeypatch.context() as broken:
        broken.setattr(run.model, "save", lambda *_, **__: 1 / 0)
        request = client.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})[1]
        answer = client.result(request["request_id"])[1]
    assert answer == {"error": "ZeroDivisionError: division by zero", "category": "server"}
    assert client.post("save_weights", {"model_id": model, "seq_id": 2, "path": "a"})[0] == 200


def test_listing(fake):
    """The REST client lists runs and states, changes and deletes them."""
    service, rest = fake.service_client(), fake.rest_client()
    assert [m.model_name for m in rest.get_server_capabilities().result().supported_models] == ["toy"]
    training = service.create_lora_training_client("toy", rank=7, user_metadata={"a": "b"}).result()
    for name in ("one", "two"):
        training.save_state(name).result()
    sampler = training.save_weights_for_sampler("s", ttl_seconds=7200).result().path
    found = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [(c.checkpoint_id, c.checkpoint_type) for c in found] == [
        ("weights/one", "training"),
        ("weights/two", "training"),
        ("sampler_weights/s", "sampler"),
    ]
    assert found[0].expires_at is None
    assert 7000 < (found[2].expires_at - found[2].time).total_seconds() < 7300
    info = rest.get_weights_info_by_tinker_path(sampler).result()
    assert (info.base_model, info.lora_rank, info.is_lora) == ("toy", 7, True)
    run = rest.get_training_run(training.model_id).result()
    assert run.user_metadata == {"a": "b"}
    assert run.last_checkpoint.checkpoint_id == "weights/two"
    assert [r.training_run_id for r in rest.list_training_runs().result().training_runs] == [training.model_id]
    rest.set_checkpoint_ttl_from_tinker_path(found[0].tinker_path, 3600).result()
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    left = rest.list_user_checkpoints(limit=1).result()
    assert [c.checkpoint_id for c in left.checkpoints] == ["weights/two"]
    assert left.cursor.total_count == 2
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_sampling_client(model_path=sampler).result()


def test_expired_states_are_gone(fake, monkeypatch):
    training = fake.service_client().create_lora_training_client("toy").result()
    path = training.save_state("a", ttl_seconds=3600).result().path
    import time

    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 4000)
    client = Client(fake.service, {"x-api-key": fake.api_key})
    assert client.post("weights_info", {"tinker_path": path})[0] == 404


def test_a_new_service_knows_the_folder(tmp_path):
    """States of a backend are on disk: another service on the folder resumes them, and samples from them."""
    losses, path, sampler = [], None, None
    for turn in range(2):
        models = BackendModels(functools.partial(rlkit.connect, "toy", folder=tmp_path))
        with Service(models, names=["toy"], folder=tmp_path, seed=0) as service, FakeTinker() as fake:
            fake.service, old = service, fake.service
            old.close()
            client = fake.service_client()
            if turn == 0:
                training = client.create_lora_training_client("toy", rank=3).result()
                trained(training, 2)
                path = training.save_state("a").result().path
                sampler = training.save_weights_for_sampler("a").result().path
                losses = trained(training, 2)
            else:
                training = client.create_training_client_from_state_with_optimizer(path).result()
                assert training.get_info().lora_rank == 3
                assert training.model_id not in path
                found = client.create_sampling_client(model_path=sampler).result()
                scored = found.compute_logprobs(prompt(b"hello world")).result()
                assert -sum(scored[1:]) == pytest.approx(
                    training.forward(DATA[:1], "cross_entropy").result().metrics["loss:sum"], rel=1e-5
                )
                assert trained(training, 2) == losses
            fake.close()
    index = json.loads((tmp_path / "tinker.json").read_text())
    assert [item["path"] for item in index] == [path, sampler]


def test_writers_at_once(fake):
    """Eight models that save under one name each at once lose nothing."""
    service = fake.service_client()
    clients = [service.create_lora_training_client("toy").result() for _ in range(8)]
    saves = [c.save_state(name) for name in "abcd" for c in clients]
    paths = [s.result().path for s in saves]
    assert len(set(paths)) == 32
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: fake.service._state.checkpoints.find(p).path, paths))
    assert found == paths
