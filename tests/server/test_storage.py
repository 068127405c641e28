"""Saving and loading: exact, by names that are used once, and listed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import shutil
import time

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.backends.toy import base_weights
from rlkit.testing import FakeTinker
from tests.server.sdk import datum, prompt

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

from rlkit.server import Service  # noqa: E402
from rlkit.server._models import Models  # noqa: E402
from rlkit.server._saved import SavedState, SavedStates  # noqa: E402
from tests.server.client import Client  # noqa: E402

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
    return fake.service.runs[training.model_id].model.backend._weights


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
    save = training.save_state("before")
    training.forward_backward(DATA, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=0.1))
    after = training.save_state("after")
    step.result()
    trained(training, 2)
    clients = [service.create_training_client_from_state(f.result().path).result() for f in (save, after)]
    base = base_weights(65, 259)
    np.testing.assert_array_equal(state(fake, clients[0]).value, base)
    assert np.abs(state(fake, clients[1]).value - base).max() == pytest.approx(0.1, rel=1e-3)


def test_sampler_weights_are_not_trained_from(fake):
    service = fake.service_client()
    training = service.create_lora_training_client("toy").result()
    sampler, full = (f("a").result().path for f in (training.save_weights_for_sampler, training.save_state))
    with pytest.raises(tinker.BadRequestError, match="training cannot start from them"):
        service.create_training_client_from_state(sampler).result()
    with pytest.raises(tinker.BadRequestError, match="saved for training"):
        service.create_sampling_client(model_path=full).result()


def test_names(fake):
    """Are used once, unless overwriting is asked for; hostile ones are refused."""
    client = Client(fake.service, {"x-api-key": fake.api_key})
    model = client.model()

    def save(seq_id, **options):
        status, answer = client.post("save_weights", {"model_id": model, "seq_id": seq_id, **options})
        return client.result(answer) if status == 200 else (status, answer["detail"])

    assert save(1, path="a")["path"] == f"tinker://{model}/weights/a"
    assert save(2, path="a")[0] == 400
    assert save(2, path="a", overwrite=True)["path"].endswith("/a")
    for name in ("", ".", "..", "../a", "/etc/x", "a/b", "a\0b", "a b", "a" * 101, ".hidden", "ä", "a\n"):
        status, message = save(3, path=name)
        assert status == 400, name
        assert "expected 1 to 100 letters" in message
    assert save(3, path="b", ttl_seconds=60)[0] == 400
    waiting = {"model_id": model, "path": "c"}  # it is not saved yet, and its name is taken
    assert client.post("save_weights", {**waiting, "seq_id": 5})[0] == 200
    assert client.post("save_weights", {**waiting, "seq_id": 6})[0] == 400
    assert save(3)["path"].endswith("/weights/000003")


def test_a_save_that_fails_gives_its_name_back(fake, monkeypatch):
    client = Client(fake.service, {"x-api-key": fake.api_key})
    model = client.model()
    with monkeypatch.context() as broken:
        broken.setattr(fake.service.runs[model].model, "save", lambda *_, **__: 1 / 0)
        answer = client.result(client.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))
    assert answer == {"error": "ZeroDivisionError: division by zero", "category": "server"}
    assert client.post("save_weights", {"model_id": model, "seq_id": 2, "path": "a"})[0] == 200


def test_a_state_is_loaded_into_a_model_that_exists(fake, monkeypatch):
    """In the order of its requests, by which the model before is freed; a request makes the run a recent one."""
    client = Client(fake.service, {"x-api-key": fake.api_key})
    model, closed = client.model(), []
    run = fake.service.runs[model]
    path = client.result(client.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
    before, run.last_request = run.model, 0.0
    monkeypatch.setattr(before, "close", lambda: closed.append(before))
    load = {"model_id": model, "seq_id": 2, "path": path, "optimizer": True}
    assert client.result(client.post("load_weights", load)) == {"path": path, "model_id": model, "type": "load_weights"}
    assert closed == [before]
    assert run.model is not before
    assert run.last_request > 0


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
    with pytest.raises(tinker.NotFoundError, match="the checkpoint .* does not exist"):
        service.create_sampling_client(model_path=sampler).result()


@contextlib.contextmanager
def served(folder):
    """A service over toy backends that keeps its states in ``folder``, as a fake with its clients."""
    fake = FakeTinker()
    fake.service.close()
    models = Models(functools.partial(rlkit.connect, "toy", folder=folder))
    fake.service = Service(models, names=["toy"], key=fake.api_key, folder=folder, seed=0)
    with fake:
        yield fake


def folders(folder):
    return sorted(path.name.rpartition("-")[0] for path in folder.iterdir() if path.is_dir())


def save_over(path, training, fake):
    """``save_state`` over a name that is taken, by a client of its own: the SDK's numbers are not disturbed."""
    client = Client(fake.service, {"x-api-key": fake.api_key})
    body = {"model_id": training.model_id, "path": path, "overwrite": True}
    return client.result(client.post("save_weights", body))["path"]


def test_what_is_deleted_frees_its_disk(tmp_path, monkeypatch):
    """So does what is overwritten, and what has expired; folders of others stay."""
    other = rlkit.connect("toy", folder=tmp_path).save("other").result()
    with served(tmp_path) as fake:
        training, rest = fake.service_client().create_lora_training_client("toy").result(), fake.rest_client()
        path = training.save_state("a").result().path
        training.save_state("b", ttl_seconds=3600).result()
        sampler = training.save_weights_for_sampler("s").result().path
        assert folders(tmp_path) == ["a-000000", "b-000000", "other-000000", "s-000000"]
        first = {x.name for x in tmp_path.iterdir()}
        assert save_over("a", training, fake) == path
        assert folders(tmp_path) == ["a-000000", "b-000000", "other-000000", "s-000000"]
        assert len({x.name for x in tmp_path.iterdir()} - first) == 1
        rest.delete_checkpoint_from_tinker_path(sampler).result()
        assert folders(tmp_path) == ["a-000000", "b-000000", "other-000000"]
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 4000)
        assert [c.tinker_path for c in rest.list_checkpoints(training.model_id).result().checkpoints] == [path]
        assert folders(tmp_path) == ["a-000000", "other-000000"]
    with rlkit.connect("toy", resume_from=other) as policy:
        assert policy.version == 0


def test_states_that_expired_while_no_server_ran(tmp_path, monkeypatch):
    with served(tmp_path) as fake:
        training = fake.service_client().create_lora_training_client("toy").result()
        training.save_state("a", ttl_seconds=3600).result()
        training.save_state("b").result()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 4000)
    with served(tmp_path):
        assert folders(tmp_path) == ["b-000000"]


def test_states_whose_files_are_gone(tmp_path, caplog):
    """After a crash between the files of a deleted state and its entry, or rm: the next service forgets the entry."""
    with served(tmp_path) as fake:
        training = fake.service_client().create_lora_training_client("toy").result()
        path, kept = training.save_state("a").result().path, training.save_state("b").result().path
        handle = fake.service.saved.find(path).handle
    shutil.rmtree(handle)
    with served(tmp_path) as fake:
        assert [state.path for state in fake.service.saved.list()] == [kept]
    assert "1 states whose files are gone" in caplog.text
    assert [item["path"] for item in json.loads((tmp_path / "tinker.json").read_text())["states"]] == [kept]


def test_files_that_cannot_be_removed(tmp_path, caplog):
    """Are named in the log, and their state is gone all the same; what is no state of rlkit's is never removed."""
    precious = tmp_path / "precious"
    precious.mkdir()
    with served(tmp_path) as fake:
        path = "tinker://r/weights/a"
        fake.service.saved.add(SavedState(path, str(precious), "toy", rlkit.Lora(), 0.0))
        fake.rest_client().delete_checkpoint_from_tinker_path(path).result()
        assert fake.service.saved.list() == []
    assert precious.is_dir()
    assert "precious is not a saved state" in caplog.text


def test_runs_survive_a_restart(tmp_path):
    """What they were, and what the user kept beside them: a state can be used without the server that made it."""
    with served(tmp_path) as fake:
        client = fake.service_client()
        training = client.create_lora_training_client("toy", rank=3, user_metadata={"renderer": "plain"}).result()
        path, run_id = training.save_state("a").result().path, training.model_id
        before = fake.rest_client().get_training_run(run_id).result()
    with served(tmp_path) as fake:
        rest = fake.rest_client()
        run = rest.get_training_run_by_tinker_path(path).result()
        assert run.model_dump(exclude={"last_request_time"}) == before.model_dump(exclude={"last_request_time"})
        assert (run.training_run_id, run.base_model, run.lora_rank) == (run_id, "toy", 3)
        assert run.user_metadata == {"renderer": "plain"}
        again = fake.service_client().create_training_client_from_state(path).result()
        assert again.model_id != run_id
        assert {r.training_run_id for r in rest.list_training_runs().result().training_runs} == {run_id, again.model_id}


def test_an_index_keeps_all_of_a_state(tmp_path):
    """As it was, the module names of an adapter among it."""
    lora = rlkit.Lora(rank=4, target_modules=("q_proj",))
    notes = {"metadata": {"a": "b"}, "run_metadata": {"c": 1}}
    state = SavedState("tinker://r/weights/a", str(tmp_path), "toy", lora, 1.0, 1e12, **notes)
    states = SavedStates(tmp_path, print)
    states.add(state)
    states.add(SavedState("tinker://r/weights/b", "tinker://x/weights/b", "toy", lora, 1.0))  # on a service, no path
    found, _ = SavedStates(tmp_path, print).list()
    assert [getattr(found, x.name) for x in attrs.fields(SavedState)] == [
        getattr(state, x.name) for x in attrs.fields(SavedState)
    ]


def test_a_damaged_index(tmp_path):
    """Is a typed error that names the file, before anything is served or removed; so is one of another format."""
    for text in ("", "{", "3", "[1]", '{"format": 2}', '{"format": 3}', '{"format": 3, "states": [{}]}'):
        (tmp_path / "tinker.json").write_text(text)
        with pytest.raises(rlkit.CheckpointError, match=r"tinker\.json"):
            SavedStates(tmp_path, print)


def test_a_name_used_twice_is_refused_at_once(fake):
    """By its first answer, by name, and the client's next calls go on."""
    training = fake.service_client().create_lora_training_client("toy").result()
    for save in (training.save_state, training.save_weights_for_sampler):
        save("a").result()
        asked = len(fake.requests)
        with pytest.raises(tinker.BadRequestError, match="use another name"):
            save("a").result(timeout=60)
        sent = [each.endpoint for each in fake.requests[asked:]]
        assert sent.count(save.__name__.replace("save_state", "save_weights")) == 1
        save("b").result(timeout=60)


def test_a_new_service_knows_the_folder(tmp_path):
    """States of a backend are on disk: another service on the folder resumes them, and samples from them."""
    with served(tmp_path) as fake:
        training = fake.service_client().create_lora_training_client("toy", rank=3).result()
        trained(training, 2)
        path = training.save_state("a").result().path
        sampler = training.save_weights_for_sampler("a").result().path
        losses = trained(training, 2)
    with served(tmp_path) as fake:
        client = fake.service_client()
        training = client.create_training_client_from_state_with_optimizer(path).result()
        assert training.get_info().lora_rank == 3
        assert training.model_id not in path
        found = client.create_sampling_client(model_path=sampler).result()
        scored = found.compute_logprobs(prompt(b"hello world")).result()
        loss = training.forward(DATA[:1], "cross_entropy").result().metrics["loss:sum"]
        assert -sum(scored[1:]) == pytest.approx(loss, rel=1e-5)
        assert trained(training, 2) == losses
    index = json.loads((tmp_path / "tinker.json").read_text())
    assert [item["path"] for item in index["states"]] == [path, sampler]


def test_writers_at_once(fake):
    """Eight models that save under one name each at once lose nothing."""
    service = fake.service_client()
    clients = [service.create_lora_training_client("toy").result() for _ in range(8)]
    saves = [c.save_state(name) for name in "abcd" for c in clients]
    paths = [s.result().path for s in saves]
    assert len(set(paths)) == 32
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: fake.service.saved.find(p).path, paths))
    assert found == paths
