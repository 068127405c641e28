"""Saving and loading: exact, by names that are used once, and listed."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import time

import attrs
import pytest
from starlette.exceptions import HTTPException

import rlkit
from rlkit.server import Service
from rlkit.server._saved import SavedState, SavedStates
from rlkit.testing import FakeTinker
from tests.server.client import Client
from tests.server.sdk import datum, prompt, tinker, types

DATA = [datum(list(b"hello world"), weights=1.0), datum(list(b"12 34"), weights=0.5)]


def train(training, steps):
    losses = []
    for _ in range(steps):
        fb = training.forward_backward(DATA, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.03)).result()
        losses.append(fb.result().metrics["loss:sum"])
    return losses


def weights_of(fake, training):
    return fake.service.runs[training.model_id].model.backend._weights


@pytest.fixture
def client(fake):
    return Client(fake.service, **{"x-api-key": fake.api_key})


@contextlib.contextmanager
def served(folder):
    """A service over toy backends that keeps its states in ``folder``, as a fake with its clients."""
    fake = FakeTinker()
    fake.service.close()
    connect = functools.partial(rlkit.connect, "toy", folder=folder)
    fake.service = Service(connect, names=["toy"], key=fake.api_key, folder=folder, seed=0)
    with fake:
        yield fake


def begin(fake, **options):
    return fake.service_client().create_lora_training_client("toy", **options).result()


def folders(folder):
    return sorted(path.name.rpartition("-")[0] for path in folder.iterdir() if path.is_dir())


def read_index(folder):
    index = json.loads((folder / "tinker.json").read_text())
    assert index["format"] == 3  # that later versions read
    return [item["path"] for item in index["states"]]


def test_names(client, monkeypatch):
    """Are used once, unless overwriting is asked for; hostile ones are refused; a save that fails gives its back."""
    model = client.model()

    def save(seq_id, **options):
        status, answer = client.save(model, seq_id, **options)
        return client.result(answer) if status == 200 else (status, answer["detail"])

    assert save(1, path="a")["path"] == f"tinker://{model}/weights/a"
    assert save(2, path="a")[0] == 400
    assert save(2, path="a", overwrite=True)["path"].endswith("/a")
    for name in ("", ".", "..", "../a", "/etc/x", "a/b", "a\0b", "a b", "a" * 101, ".hidden", "ä", "a\n"):
        status, message = save(3, path=name)
        assert (status, "expected 1 to 100 letters" in message) == (400, True), name
    assert save(3, path="b", ttl_seconds=60)[0] == 400
    assert client.save(model, 5, path="c")[0] == 200  # it is not saved yet, and its name is taken
    assert client.save(model, 6, path="c")[0] == 400
    assert save(3)["path"].endswith("/weights/000003")
    with monkeypatch.context() as broken:
        broken.setattr(client.service.runs[model].model, "save", lambda *_, **__: 1 / 0)
        assert save(4, path="d") == {"error": "ZeroDivisionError: division by zero", "category": "server"}
    assert save(7, path="d")["path"].endswith("/d")


def test_a_taken_name_is_refused_at_once(fake):
    """By the first answer, which the SDK does not ask for again; the client's next calls go on."""
    training = begin(fake)
    for save in (training.save_state, training.save_weights_for_sampler):
        save("a").result()
        asked = len(fake.requests)
        with pytest.raises(tinker.BadRequestError, match="use another name"):
            save("a").result(timeout=60)
        sent = [each.endpoint for each in fake.requests[asked:]]
        assert sent.count(save.__name__.replace("save_state", "save_weights")) == 1
        save("b").result(timeout=60)


def test_states_are_loaded(client, monkeypatch):
    """Into a model that exists in the order of its requests, by which the one before is freed; for what they are."""
    model, closed = client.model(), []
    run = client.service.runs[model]
    path = client.result(client.save(model, 1, path="a"))["path"]
    before, run.last_request = run.model, 0.0
    monkeypatch.setattr(before, "close", lambda: closed.append(before))
    load = {"model_id": model, "seq_id": 2, "path": path, "optimizer": True}
    loaded = client.result(client.post("load_weights", load))
    assert loaded == {"path": path, "model_id": model, "type": "load_weights"}
    assert closed == [before]
    assert run.model is not before
    assert run.last_request > 0
    other = client.model(1, lora_config={"rank": 4})
    small = client.result(client.save(other, 1, path="b"))["path"]
    monkeypatch.setattr(client.service, "max_rank", 3)
    status, answer = client.post("load_weights", {**load, "seq_id": 3, "path": small})
    assert (status, answer["detail"]) == (400, f"the rank of {small} is 4; this server's limit is 3")
    monkeypatch.undo()
    client.result(client.post("load_weights", {**load, "seq_id": 4, "path": small}))
    assert client.post("get_info", {"model_id": model})[1]["lora_rank"] == 4  # and what is saved next says so
    sampler = client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "a"})
    status, answer = client.post("load_weights", {**load, "seq_id": 6, "path": client.result(sampler)["path"]})
    assert (status, "training cannot start from them" in answer["detail"]) == (400, True)
    body = {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": path}
    status, answer = client.post("create_sampling_session", body)
    assert (status, "saved for training" in answer["detail"]) == (400, True)


def test_listing(fake):
    """The REST client changes and deletes states, and lists them by the page; bits.json has the lists themselves."""
    rest, training = fake.rest_client(), begin(fake)
    assert rest.get_training_run(training.model_id).result().last_checkpoint is None
    for name, seconds in (("one", None), ("two", 7200)):
        training.save_state(name, ttl_seconds=seconds).result()
    one, two = rest.list_checkpoints(training.model_id).result().checkpoints
    assert one.expires_at is None
    assert 7000 < (two.expires_at - two.time).total_seconds() < 7300
    rest.set_checkpoint_ttl_from_tinker_path(one.tinker_path, 3600).result()
    page = rest.list_user_checkpoints(limit=1, offset=1).result()
    assert [c.tinker_path for c in page.checkpoints] == [one.tinker_path]
    assert page.checkpoints[0].expires_at is not None
    rest.delete_checkpoint_from_tinker_path(two.tinker_path).result()
    left = rest.list_user_checkpoints().result()
    assert left.checkpoints[0].tinker_path == one.tinker_path
    assert left.cursor.total_count == len(left.checkpoints) == page.cursor.total_count - 1


def test_what_is_deleted_frees_its_disk(tmp_path, monkeypatch):
    """So does what is overwritten, and what has expired, also while no server ran; folders of others stay."""
    other = rlkit.connect("toy", folder=tmp_path).save("other").result()
    with served(tmp_path) as fake:
        training, rest = begin(fake), fake.rest_client()
        path = training.save_state("a").result().path
        for name, seconds in (("b", 3600), ("c", 7200)):
            training.save_state(name, ttl_seconds=seconds).result()
        sampler = training.save_weights_for_sampler("s").result().path
        assert folders(tmp_path) == ["a-000000", "b-000000", "c-000000", "other-000000", "s-000000"]
        first, client = {x.name for x in tmp_path.iterdir()}, Client(fake.service, **{"x-api-key": fake.api_key})
        # By a client of its own: the SDK's numbers are not disturbed.
        assert client.result(client.save(training.model_id, path="a", overwrite=True))["path"] == path
        assert folders(tmp_path) == ["a-000000", "b-000000", "c-000000", "other-000000", "s-000000"]
        assert len({x.name for x in tmp_path.iterdir()} - first) == 1
        rest.delete_checkpoint_from_tinker_path(sampler).result()
        assert folders(tmp_path) == ["a-000000", "b-000000", "c-000000", "other-000000"]
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 4000)
        with pytest.raises(HTTPException, match="404"):
            fake.service.saved.find(f"tinker://{training.model_id}/weights/b")
        found = rest.list_checkpoints(training.model_id).result().checkpoints
        assert [c.checkpoint_id for c in found] == ["weights/c", "weights/a"]
        assert folders(tmp_path) == ["a-000000", "c-000000", "other-000000"]
    monkeypatch.setattr(time, "time", lambda: now + 8000)
    with served(tmp_path):
        assert folders(tmp_path) == ["a-000000", "other-000000"]
    with rlkit.connect("toy", resume_from=other) as policy:
        assert policy.version == 0


def test_files_that_are_gone_or_cannot_be_removed(tmp_path, caplog):
    """After a crash between the files of a deleted state and its entry, or rm, the next service forgets the entry.

    Deleting an entry whose folder is not a saved state of rlkit removes the entry, keeps the folder, and logs its name.
    """
    with served(tmp_path) as fake:
        training = begin(fake)
        path, kept = training.save_state("a").result().path, training.save_state("b").result().path
        handle = fake.service.saved.find(path).handle
    shutil.rmtree(handle)
    precious = tmp_path / "precious"
    precious.mkdir()
    with served(tmp_path) as fake:
        assert [state.path for state in fake.service.saved.list()] == [kept]
        assert "1 states whose files are gone" in caplog.text
        assert read_index(tmp_path) == [kept]
        fake.service.saved.add(SavedState("tinker://r/weights/a", str(precious), "toy", rlkit.Lora(), 0.0))
        fake.rest_client().delete_checkpoint_from_tinker_path("tinker://r/weights/a").result()
        assert [state.path for state in fake.service.saved.list()] == [kept]
    assert precious.is_dir()
    assert "precious is not a saved state" in caplog.text


def test_a_new_service_knows_the_folder(tmp_path):
    """What runs were, and what the user kept beside them: it resumes their states, and samples from them."""
    with served(tmp_path) as fake:
        training = begin(fake, rank=3, user_metadata={"renderer": "plain"})
        train(training, 2)
        path, run_id = training.save_state("a").result().path, training.model_id
        sampler = training.save_weights_for_sampler("a").result().path
        losses, before = train(training, 2), fake.rest_client().get_training_run(run_id).result()
        (other := begin(fake)).save_state("only").result()
    with served(tmp_path) as fake:
        rest, client = fake.rest_client(), fake.service_client()
        run = rest.get_training_run_by_tinker_path(path).result()
        assert run.model_dump(exclude={"last_request_time"}) == before.model_dump(exclude={"last_request_time"})
        assert (run.training_run_id, run.base_model, run.lora_rank) == (run_id, "toy", 3)
        assert run.user_metadata == {"renderer": "plain"}
        training = client.create_training_client_from_state_with_optimizer(path).result()
        assert training.get_info().lora_rank == 3
        assert training.model_id != run_id
        runs = rest.list_training_runs().result().training_runs
        assert [r.training_run_id for r in runs] == [training.model_id, other.model_id, run_id]
        found = client.create_sampling_client(model_path=sampler).result()
        scored = found.compute_logprobs(prompt(b"hello world")).result()
        loss = training.forward(DATA[:1], "cross_entropy").result().metrics["loss:sum"]
        assert -sum(scored[1:]) == pytest.approx(loss, rel=1e-5)
        assert train(training, 2) == losses
    assert read_index(tmp_path) == [path, sampler, f"tinker://{other.model_id}/weights/only"]


def test_clients_of_an_earlier_server_are_not_taken_for_new_ones(tmp_path):
    """On the same folder, with the same seed: its calls would train another's model, and get another's results."""
    ids, requests = [], []
    for _ in range(2):
        with served(tmp_path) as fake:
            ids.append(begin(fake).model_id)
            requests += fake.service.results._all
    assert ids[0] != ids[1]
    assert len(set(requests)) == 2


def test_a_folder_may_be_moved(tmp_path):
    """With its list of states and what is in it."""
    with served(tmp_path / "here") as fake:
        path = begin(fake).save_state("a").result().path
    (tmp_path / "here").rename(tmp_path / "there")
    with served(tmp_path / "there") as fake:
        fake.service_client().create_training_client_from_state(path).result()


def test_an_index_keeps_all_of_a_state(tmp_path, monkeypatch):
    """As it was, the module names of an adapter among it; a path is found again from another directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    lora, notes = rlkit.Lora(rank=4, target_modules=("q_proj",)), {"metadata": {"a": "b"}, "run_metadata": {"c": 1}}
    state = SavedState("tinker://r/weights/a", str(tmp_path), "toy", lora, 1.0, 1e12, **notes)
    folder = tmp_path / "new" / "folder"
    states = SavedStates(folder, print)
    states.add(state)
    states.add(SavedState("tinker://r/weights/b", "tinker://x/weights/b", "toy", lora, 1.0))  # on a service, no path
    states.add(SavedState("tinker://r/weights/c", "kept", "toy", lora, 1.0))
    with pytest.raises(rlkit.CheckpointError, match="in use by another server"):
        SavedStates(folder, print)  # each would overwrite what the other knows
    states.close()
    monkeypatch.chdir("/")
    found, *others = SavedStates(folder, print).list()
    assert attrs.asdict(found, recurse=False) == attrs.asdict(state, recurse=False)
    assert [each.handle for each in others] == ["tinker://x/weights/b", str(tmp_path / "kept")]


def test_a_damaged_index(tmp_path):
    """Is a typed error that names the file, before anything is served or removed; so is one of another format."""
    for text in ("", "{", "3", "[1]", '{"format": 2}', '{"format": 3}', '{"format": 3, "states": [{}]}'):
        (tmp_path / "tinker.json").write_text(text)
        with pytest.raises(rlkit.CheckpointError, match=r"tinker\.json"):
            SavedStates(tmp_path, print)
    (tmp_path / "file").touch()
    with pytest.raises(rlkit.CheckpointError, match="cannot be written"):
        SavedStates(tmp_path / "file", print)
