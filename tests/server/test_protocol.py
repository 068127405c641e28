"""The protocol without the SDK: what is carried out, in which order, and what is refused with which words."""

from __future__ import annotations

import asyncio
import time

import httpx
import numpy as np
import pytest

pytest.importorskip("tinker")
from tinker.proto import tinker_public_pb2 as pb

from rlkit.backends.toy import ToySampler
from rlkit.server import Service, _app
from rlkit.server._models import toy_models
from tests.each import for_each
from tests.server.client import SESSION, Client, training_call


@pytest.fixture
def make():
    made = []

    def new(**options):
        made.append(Service(toy_models(), names=["toy"], seed=0, **options))
        return Client(made[-1])

    yield new
    for service in made:
        service.close()


def steps(client):
    return [x.seq_id for x in client.service.applied if x.operation == "optim_step"]


def test_requests_are_carried_out_in_the_clients_order(make, monkeypatch):
    """Whatever order they arrive in."""
    monkeypatch.setattr(_app, "_POLL", 0.05)
    client = make()
    model = client.model()
    third, second = client.step(model, 3)[1], client.step(model, 2)[1]
    assert client.post("retrieve_future", second | {"model_id": model}) == (
        408,
        {"type": "try_again", "request_id": second["request_id"], "queue_state": "active"},
    )
    first = client.step(model, 1)[1]
    monkeypatch.undo()
    for accepted in (third, second, first):
        assert "metrics" in client.result(accepted)
    assert steps(client) == [1, 2, 3]


def test_a_request_that_never_comes(make):
    """What waits for it fails in the end, and says what it waited for."""
    client = make(patience=0.05)
    model = client.model()
    accepted = client.step(model, 2)
    for _ in range(2):
        answer = client.result(accepted)
        assert answer["category"] == "user"
        assert "seq_id 1, never arrived" in answer["error"]
    client.result(client.step(model, 1))
    client.service.runs[model].worker.drain()
    assert steps(client) == [1]  # what was given up is not carried out later


def test_a_request_that_comes_twice(make):
    """Is carried out once and gets the first one's id; another request cannot take its number."""
    client = make()
    model = client.model()
    first, again = client.step(model, 1)[1], client.step(model, 1)[1]
    assert first == again
    assert client.result(first) == client.result(first)
    assert steps(client) == [1]
    status, answer = client.post("forward_backward", training_call(model, 1).SerializeToString())
    assert status == 400
    assert "already belongs to a optim_step" in answer["detail"]
    assert client.model() == model
    save = {"model_id": model, "seq_id": 2, "path": "a"}
    assert client.post("save_weights", save) == client.post("save_weights", save)  # the name is its own


def test_a_server_that_does_not_recognise_repeats(make):
    client = make(dedupe=False)
    model = client.model()
    accepted = [client.step(model, 1)[1] for _ in range(2)]
    assert accepted[0] != accepted[1]
    assert all("metrics" in client.result(x) for x in accepted)
    assert steps(client) == [1, 1]


def test_a_refused_request_has_had_its_turn(make):
    """Wherever it was refused: the next one is carried out; sent again with better contents it is, too."""
    refused = [
        ("save_weights_somewhere", {}),
        ("optim_step", {"adam_params": 3}),
        ("optim_step", {"adam_params": {"learning_rate": -1}}),
        ("samplers/x", {}),
        ("save_weights", {"path": "a/b"}),
        ("load_weights", {"path": "tinker://a/weights/b", "optimizer": True}),
        ("forward_backward", training_call("", 0).SerializeToString()),
    ]
    client = make(patience=0.3)
    for number, (path, more) in enumerate(refused):
        model = client.model(number)
        body = {"model_id": model, "seq_id": 1} | more if isinstance(more, dict) else more
        if isinstance(body, bytes):
            message = training_call(model, 1)
            message.ClearField("data")
            body = message.SerializeToString()
        assert client.post(path, body)[0] in (400, 404, 405, 422), path
        assert "metrics" in client.result(client.step(model, 2)), path
        assert "metrics" in client.result(client.step(model, 1)), path
    assert steps(client) == [2, 1] * len(refused)


def test_a_refused_copy_of_a_request_that_waits(make):
    """Does not take its turn: another request under a number that is held is refused, and that one is carried out."""
    client = make()
    model = client.model()
    waiting = client.step(model, 2)
    assert client.post("nothing", {"model_id": model, "seq_id": 2})[0] == 404
    client.result(client.step(model, 1))
    assert "metrics" in client.result(waiting)
    assert steps(client) == [1, 2]


def test_old_results_are_gone_and_never_repeated(make, monkeypatch):
    monkeypatch.setattr(_app, "_KEPT", 2)
    client = make()
    model = client.model()
    accepted = [client.step(model, seq_id)[1] for seq_id in range(1, 6)]
    for each in accepted:
        client.result(each)
    assert client.post("retrieve_future", accepted[0])[0] == 410
    client.result(accepted[4])
    assert client.step(model, 1)[0] == 410
    assert steps(client) == [1, 2, 3, 4, 5]


def test_results_that_nobody_reads_are_bounded(make, monkeypatch):
    monkeypatch.setattr(_app, "_LIMIT", 3)
    client = make()
    model = client.model()
    accepted = []
    for seq_id in range(1, 7):
        accepted.append(client.step(model, seq_id)[1])
        client.service.runs[model].worker.drain()
    assert [client.post("retrieve_future", x)[0] for x in accepted] == [410, 410, 410, 200, 200, 200]


def test_a_request_is_cancelled(make, monkeypatch):
    """If it has not started: it is not carried out, and its result is gone."""
    client = make()
    model = client.model()
    accepted = client.step(model, 2)[1]
    assert client.post("cancel_future", accepted) == (200, {})
    client.result(client.step(model, 1))
    assert client.post("retrieve_future", accepted)[0] == 410
    client.service.runs[model].worker.drain()
    assert steps(client) == [1]


def test_a_failed_call_adds_nothing(make):
    """And what follows is carried out, as the real service does."""
    client = make()
    model = client.model()
    bad = client.post("forward_backward", training_call(model, 1, targets=(2, 400)).SerializeToString())
    step = client.step(model, 2)
    answer = client.result(bad)
    assert answer["category"] == "user"
    assert "[0, 258]" in answer["error"]
    assert client.result(step) == {"metrics": {"grad_norm:mean": 0.0}}


def test_fields_of_newer_clients_are_let_through(make):
    """Nested ones, too: the SDK's own types would refuse them."""
    client = make()
    model = client.model(lora_config={"rank": 4, "new_nested": {"a": 1}}, new_field=[1])
    assert "metrics" in client.result(client.step(model, 1, new_number=3.0))
    assert client.sample(client.sampler(new=1), params={"new": 2}, new=None)[0] == 200


@for_each(
    ("path", "body", "status", "message"),
    [
        ("nothing", {}, 404, "POST /api/v1/nothing is not an endpoint"),
        ("samplers/x", {}, 405, "takes GET"),
        ("training_runs/x/checkpoints/weights/a/publish", {}, 405, "takes DELETE"),
        ("save_weights_external", {}, 404, "not an endpoint"),
        ("create_custom_loss", {}, 404, "not an endpoint"),
        ("optim_step", b"{", 422, "optim_step: Invalid JSON"),
        ("optim_step", [1], 422, "should be an object"),
        ("optim_step", b"[" * 200_000, 422, "JSON"),
        ("retrieve_future", b'{"a":' * 200_000, 422, "JSON"),
        ("create_session", b"1" * 10_000, 422, "create_session: "),
        ("optim_step", {}, 422, "optim_step.model_id: Field required"),
        ("optim_step", {"model_id": 3}, 422, "optim_step.model_id: Input should be a valid string"),
        ("optim_step", {"model_id": "x"}, 404, "model 'x' is unknown"),
        ("optim_step", {"model_id": "x", "seq_id": -1}, 422, "seq_id is -1"),
        ("forward_backward", b"\xff\xff", 422, "not a ForwardBackwardRequest"),
        ("retrieve_future", {"request_id": "x"}, 404, "request 'x' is unknown"),
        ("retrieve_future", {"request_id": "sample-000099"}, 404, "is unknown"),
        ("cancel_future", {"request_id": "x"}, 404, "request 'x' is unknown"),
        ("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": "toy"}, 404, "session 'x' is unknown"),
        ("create_model", {"model_seq_id": 9, "base_model": "big"}, 400, "this server has: toy"),
        ("create_model", {"model_seq_id": 9, "base_model": "toy", "lora_config": {"rank": 500}}, 400, "limit is 128"),
        ("create_model", {"model_seq_id": 9, "base_model": "toy", "lora_config": {"rank": 0}}, 400, "rank"),
        (
            "create_model",
            {"model_seq_id": 9, "base_model": "toy", "optimizer_config": {"type": "dimuon"}},
            400,
            "adamw",
        ),
        ("create_sampling_session", {"sampling_session_seq_id": 0}, 400, "neither"),
        ("create_sampling_session", {"sampling_session_seq_id": 0, "base_model": "x"}, 400, "has: toy"),
        ("create_sampling_session", {"sampling_session_seq_id": 0, "model_path": "x"}, 400, "is not a checkpoint"),
        (
            "create_sampling_session",
            {"sampling_session_seq_id": 0, "model_path": "tinker://a/sampler_weights/b"},
            404,
            "the checkpoint tinker://a/sampler_weights/b does not exist",
        ),
        ("load_weights", {"model_seq_id": 9, "path": "tinker://a/weights/b", "optimizer": True}, 404, "does not exist"),
        ("weights_info", {"tinker_path": "/etc/passwd"}, 400, "is not a checkpoint"),
    ],
)
def test_refused(make, path, body, status, message):
    """With a status and one sentence that says what is wrong."""
    client = make()
    if isinstance(body, dict) and ("model_seq_id" in body or "sampling_session_seq_id" in body):
        body = {"session_id": client.session, **body}
    found, answer = client.post(path, body)
    assert found == status, answer
    assert message in answer["detail"]


def test_bad_optimizer_settings(make):
    client = make()
    model = client.model()
    for params in (
        {"learning_rate": None},
        {"learning_rate": float("nan")},
        {"learning_rate": -1.0},
        {"learning_rate": 10**400},
        {"learning_rate": float("inf")},
        {"beta1": 1.0},
        {"eps": 0.0},
        {"eps": "small"},
        {"grad_clip_norm": True},
    ):
        status, answer = client.step(model, 1, **params)
        assert status in (400, 422), params
        assert next(iter(params)) in answer["detail"]
    assert steps(client) == []


def test_default_optimizer_settings(make):
    """What the client leaves out is the API's default; another optimizer's numbers are never AdamW's."""
    client = make()
    model = client.model()
    client.result(client.post("forward_backward", training_call(model, 1).SerializeToString()))
    weights = client.service.runs[model].model.backend._weights
    before = weights.value
    client.result(client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}))
    assert abs(abs(weights.value - before).max() - 1e-4) < 1e-8
    for params in ({"type": "dimuon"}, {"type": "dimuon", "learning_rate": 0.1, "beta1": 0.5}):
        status, answer = client.post("optim_step", {"model_id": model, "seq_id": 3, "optimizer_params": params})
        assert status == 400
        assert "'dimuon'" in answer["detail"]


def _make_sparse(message, shape, rows):
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.ClearField("shape")
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.array([4, 5], np.int64).tobytes()
    tensor.sparse_csr.crow_indices = np.array(rows, np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.array([0, 2], np.int64).tobytes()


@for_each(
    ("change", "message"),
    [
        (lambda m: m.ClearField("data"), "data is empty"),
        (lambda m: m.data[0].model_input[0].image.__setattr__("data", b"x"), "chunk of image"),
        (lambda m: m.data[0].ClearField("model_input"), "one row per token"),
        (lambda m: m.data[0].model_input[0].encoded_text.__setattr__("tokens", b"123"), "multiple of 4"),
        (
            lambda m: m.data[0].loss_fn_inputs["target_tokens"].__setattr__("dtype", pb.DTYPE_BFLOAT16),
            "float32 or int64",
        ),
        (lambda m: m.data[0].loss_fn_inputs["target_tokens"].__setattr__("dense", b"1"), "multiple of 8"),
        (lambda m: m.data[0].loss_fn_inputs["target_tokens"].shape.append(7), "for the shape [2, 7]"),
        (lambda m: m.data[0].loss_fn_inputs["target_tokens"].sparse_csr.SetInParent(), "two dimensions"),
        (lambda m: _make_sparse(m, [2, 3], [0, 1, 5]), "indices do not fit"),
        (lambda m: _make_sparse(m, [2, 3], [1, 1, 2]), "indices do not fit"),
        (lambda m: _make_sparse(m, [3, 3], [0, 2, 1, 2]), "indices do not fit"),
        (lambda m: _make_sparse(m, [2, 3], [0, 1]), "indices do not fit"),
        (lambda m: _make_sparse(m, [2, 2], [0, 1, 2]), "indices do not fit"),
        (lambda m: _make_sparse(m, [2, 10**12], [0, 1, 2]), "bounded size"),
    ],
)
def test_bad_messages(make, change, message):
    client = make()
    request = training_call(client.model(), 1)
    change(request)
    status, answer = client.post("forward_backward", request.SerializeToString())
    assert status == 400
    assert message in answer["detail"]


def test_a_key():
    """Without it no request is answered, and the answer does not show it."""
    with Service(toy_models(), names=["toy"], key="tml-secret-one") as service:
        Client(service, {"authorization": "Bearer tml-secret-one"})
        client = Client(service, {"x-api-key": "tml-secret-one"})
        assert client.get("healthz") == (200, {"status": "ok"})
        for key in ("", "tml-secret", "tml-secret-two"):
            client.headers = {"x-api-key": key}
            status, answer = client.post("optim_step", b"x")
            assert (status, "secret" in str(answer)) == (401, False)
        client.headers = {"x-api-key": "tml-secret-one", "origin": "http://page.example"}
        assert client.get("healthz")[0] == 403


def test_a_body_that_grows_too_large(make, monkeypatch):
    """Is refused while it is read, and not read again for its seq_id."""
    monkeypatch.setattr(_app, "_BODY_LIMIT", 1000)

    async def parts():
        for _ in range(20):
            yield b"x" * 100

    status, answer = make().post("optim_step", parts())
    assert (status, "at most 1000 bytes" in answer["detail"]) == (413, True)


def test_sessions(make):
    """One that was finished answers 410 and frees what it had; it may be finished twice."""
    client = make()
    model, sampler = client.model(), client.sampler()
    assert client.post(f"sessions/{client.session}/finish", {})[0] == 200
    assert client.step(model, 1)[0] == 410
    assert client.post("session_heartbeat", {"session_id": client.session})[0] == 410
    assert client.sample(sampler)[0] == 410
    assert client.post(f"sessions/{client.session}/finish", {})[0] == 200
    assert client.post("sessions/x/finish", {})[0] == 404
    assert client.service.samplers == {}
    until_freed(client, model)


def test_a_model_is_unloaded(make):
    """After what was asked for before, once; what is asked for after is refused at once, and samplers stay."""
    client = make()
    model = client.model()
    snapshot = client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0})
    step = client.step(model, 2)
    first, again = (client.post("unload_model", {"model_id": model}) for _ in range(2))
    assert first == again
    assert client.result(first) == {"model_id": model, "type": "unload_model"}
    assert "metrics" in client.result(step)
    assert client.step(model, 3)[0] == 410
    client.result(client.sample(client.result(snapshot)["sampling_session_id"]))
    until_freed(client, model)


def until_freed(client, model):
    """Waits for the model's own thread to let go of it."""
    end = time.monotonic() + 30
    while client.service.runs[model].model is not None:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_model_that_could_not_be_made(make, monkeypatch):
    """Its client learns why, and what follows fails with a hint to that."""
    client = make()
    monkeypatch.setattr(client.service.models, "create", lambda _: 1 / 0)
    accepted = client.post("create_model", {"session_id": client.session, "model_seq_id": 0, "base_model": "toy"})[1]
    assert client.result(accepted) == {"error": "ZeroDivisionError: division by zero", "category": "server"}
    assert "could not be created" in client.result(client.step(accepted["model_id"], 1))["error"]


@for_each(
    "tensor",
    [
        {"data": ["x"], "shape": [1, 1]},
        {"data": [10**30], "shape": [1, 1]},
        {"data": [1], "shape": ["a"]},
        {"data": [1], "shape": []},
        {"data": [1], "shape": None},
        {"data": [-1], "shape": [1, 1]},
        {"data": [-2], "shape": [1, 1]},
        {"data": [1, 2], "shape": [-1, -2]},
        {"data": [1, 2], "shape": [2, 1]},
        {"data": [[1], [2, 3]], "shape": [1, 1]},
        {"data": [1], "shape": [1, 3], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]},
    ],
)
def test_bad_targets_of_prompts(make, tensor):
    """Are refused by name, whatever they are."""
    client = make()
    status, answer = client.sample(client.sampler(), target_prompt_logprobs={"dtype": "int64", **tensor})
    assert status in (400, 422)
    assert "target_prompt_logprobs" in answer["detail"]


def test_a_mistake_in_the_server_is_a_500(make, monkeypatch, caplog):
    """And does not show what went wrong to the client."""
    client = make()
    monkeypatch.setattr(client.service.saved, "list", lambda *_: 1 / 0)
    assert client.get("checkpoints") == (500, {"detail": "ZeroDivisionError in the server; its log says more"})
    assert "GET /api/v1/checkpoints failed" in caplog.text


def test_same_seed_same_ids():
    """Session ids and unseeded samples depend on the seed alone."""
    ids = []
    for seed in (0, 0, 1):
        with Service(toy_models(), names=["toy"], seed=seed) as service:
            ids.append(Client(service).session)
    assert ids[0] == ids[1] != ids[2]


def test_idle_sessions_end(make):
    """Their models are freed when the next client comes; one that gives signs of life stays."""
    client = make(idle=600.0)
    model = client.model()
    alive = client.post("create_session", SESSION)[1]["session_id"]
    sessions = client.service.sessions
    for _ in range(5):  # two minutes each
        for session in (client.session, alive):
            sessions[session].last_seen -= 130.0
        assert client.post("session_heartbeat", {"session_id": alive})[0] == 200
    client.post("create_session", SESSION)
    assert client.post("session_heartbeat", {"session_id": alive})[0] == 200
    assert client.step(model, 1)[0] == 410


def test_what_a_client_is_told(make):
    """Losses run on its side; only a server that recognises repeats says so."""
    for dedupe, header in ((True, "1"), (False, None)):
        client = make(dedupe=dedupe, config={"fwdbwd_max_chunk_len": 3})

        async def ask(app=client.service.app):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as asking:
                return await asking.post("http://localhost/api/v1/client/config")

        answer = asyncio.run(ask())
        assert answer.headers.get("x-rlkit-deduplicates") == header
        assert answer.json() == {
            "pjwt_auth_enabled": False,
            "use_pyqwest_transport": False,
            "custom_loss_server_side": False,
            "fwdbwd_max_chunk_len": 3,
        }


def test_options_that_the_sdk_has_no_fields_for(make, monkeypatch):
    """min_p and the penalties reach the sampler, which may refuse them by name, and are held to their ranges."""
    client, seen, sample = make(), [], ToySampler.sample

    def recorded(self, prompt, params, **given):
        seen.append(params)
        return sample(self, prompt, params, **given)

    monkeypatch.setattr(ToySampler, "sample", recorded)
    sampler = client.sampler()
    for number, options in enumerate(({"temperature": 0.0}, {"min_p": 1.0, "top_p": 0.9}, {"presence_penalty": -2.0})):
        params = {"max_tokens": 6, "seed": 1, "stop": [], **options}
        answer = client.result(client.sample(sampler, number, params=params, num_samples=4))
        assert {name: getattr(seen[-1], name) for name in options} == options
        if number == 0:
            assert len(pb.SampleResponse.FromString(answer).sequences) == 4
        else:
            assert f"{min(options)}=" in str(answer)
    status, answer = client.sample(sampler, 9, params={"min_p": 2.0})
    assert (status, "min_p" in answer["detail"]) == (400, True)


def test_a_row_is_read_from_its_request_once(make):
    """Its arrays are its own and may be written to: a body's buffer is neither kept nor changed."""
    from rlkit.server._wire import read_datum

    body = training_call("m", 1).SerializeToString()
    tokens, inputs = read_datum("data[0]", pb.ForwardBackwardRequest.FromString(body).data[0])
    for array in (tokens, inputs["target_tokens"]):
        array += 1
    np.testing.assert_array_equal(tokens, [2, 3])
    assert body == training_call("m", 1).SerializeToString()
