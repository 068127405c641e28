"""The protocol without the SDK: what is carried out, in which order, and what is refused with which words."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import httpx
import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

import rlkit
from rlkit.backends.toy import ToySampler
from rlkit.server import _app
from rlkit.server._wire import read_datum
from rlkit.testing._faketinker import RecordingService
from tests.each import for_each
from tests.server.client import SESSION, Client, training_call


@pytest.fixture
def make():
    made = []

    def new(**options):
        made.append(RecordingService(names=["toy"], seed=0, **options))
        return Client(made[-1])

    yield new
    for service in made:
        service.close()


@pytest.fixture
def client(make):
    return make()


@pytest.fixture
def model(client):
    return client.model()


def drain(client, model):
    client.service.runs[model].worker.drain()


def test_requests_are_carried_out_in_the_clients_order(client, model, monkeypatch):
    """Whatever order they arrive in."""
    monkeypatch.setattr(_app, "_POLL", 0.05)
    third, second = client.step(model, 3)[1], client.step(model, 2)[1]
    waiting = {"type": "try_again", "request_id": second["request_id"], "queue_state": "active"}
    assert client.post("retrieve_future", second | {"model_id": model}) == (408, waiting)
    first = client.step(model, 1)[1]
    monkeypatch.undo()
    for accepted in (third, second, first):
        assert "metrics" in client.result(accepted)
    assert client.steps() == [1, 2, 3]


def test_a_request_that_never_comes(make):
    """What waits for it fails in the end, says what it waited for, and is not carried out later."""
    client = make(patience=0.05)
    model = client.model()
    accepted = client.step(model, 2)
    for _ in range(2):
        answer = client.result(accepted)
        assert answer["category"] == "user"
        assert "seq_id 1, never arrived" in answer["error"]
    client.result(client.step(model, 1))
    drain(client, model)
    assert client.steps() == [1]


def test_a_request_that_comes_twice(client, model, make):
    """Is carried out once and gets the first one's id; another request cannot take its number."""
    first, again = client.step(model, 1)[1], client.step(model, 1)[1]
    assert first == again
    assert client.result(first) == client.result(first)
    status, answer = client.post("forward_backward", training_call(model, 1).SerializeToString())
    assert (status, "already belongs to a optim_step" in answer["detail"]) == (400, True)
    assert client.model() == model
    assert client.save(model, 2, path="a") == client.save(model, 2, path="a")  # the name is its own
    assert client.steps() == [1]
    other = make(dedupe=False)  # a server that does not recognise repeats
    other.model()
    accepted = [other.step(model, 1)[1] for _ in range(2)]
    assert accepted[0] != accepted[1]
    assert all("metrics" in other.result(x) for x in accepted)
    assert other.steps() == [1, 1]


def test_a_refused_request_has_had_its_turn(make):
    """Wherever it was refused: the next one is carried out; sent again with better contents it is, too."""
    empty = training_call("", 1)
    empty.ClearField("data")
    refused = [
        ("save_weights_somewhere", {}),
        ("optim_step", {"adam_params": 3}),
        ("optim_step", {"adam_params": {"learning_rate": -1}}),
        ("samplers/x", {}),
        ("save_weights", {"path": "a/b"}),
        ("load_weights", {"path": "tinker://a/weights/b", "optimizer": True}),
        ("forward_backward", empty),
    ]
    client = make(patience=0.3)
    for number, (path, body) in enumerate(refused):
        model = empty.model_id = client.model(number)
        sent = empty.SerializeToString() if body is empty else {"model_id": model, "seq_id": 1, **body}
        assert client.post(path, sent)[0] in (400, 404, 405, 422), path
        assert "metrics" in client.result(client.step(model, 2)), path
        assert "metrics" in client.result(client.step(model, 1)), path
    assert client.steps() == [2, 1] * len(refused)
    waiting = client.step(model, 4)  # a refused copy of it does not take its turn
    assert client.post("nothing", {"model_id": model, "seq_id": 4})[0] == 404
    client.result(client.step(model, 3))
    assert "metrics" in client.result(waiting)


def test_results_are_bounded(client, model, monkeypatch):
    """Those that were read long ago are gone and never repeated; so are the oldest of very many."""
    monkeypatch.setattr(_app, "_KEPT", 2)
    accepted = [client.step(model, seq_id)[1] for seq_id in range(1, 6)]
    for each in accepted:
        client.result(each)
    assert client.post("retrieve_future", accepted[0])[0] == 410
    client.result(accepted[4])
    assert client.step(model, 1)[0] == 410
    assert client.steps() == [1, 2, 3, 4, 5]
    monkeypatch.setattr(_app, "_LIMIT", 3)
    accepted = []
    for seq_id in range(6, 12):
        accepted.append(client.step(model, seq_id)[1])
        drain(client, model)
    assert [client.post("retrieve_future", x)[0] for x in accepted] == [410, 410, 410, 200, 200, 200]


def test_a_request_is_cancelled(client, model):
    """If it has not started: it is not carried out, and its result is gone."""
    accepted = client.step(model, 2)[1]
    assert client.post("cancel_future", accepted) == (200, {})
    client.result(client.step(model, 1))
    assert client.post("retrieve_future", accepted)[0] == 410
    drain(client, model)
    assert client.steps() == [1]


def test_a_failed_call_adds_nothing(client, model):
    """And what follows is carried out, as the real service does."""
    bad = client.post("forward_backward", training_call(model, 1, targets=(2, 400)).SerializeToString())
    step = client.step(model, 2)
    answer = client.result(bad)
    assert (answer["category"], "[0, 258]" in answer["error"]) == ("user", True)
    assert client.result(step) == {"metrics": {"grad_norm:mean": 0.0}}


def test_fields_of_newer_clients_are_let_through(client):
    """Nested ones, too: the SDK's own types would refuse them."""
    model = client.model(lora_config={"rank": 4, "new_nested": {"a": 1}}, new_field=[1])
    assert "metrics" in client.result(client.step(model, 1, new_number=3.0))
    assert client.sample(client.sampler(new=1), params={"new": 2}, new=None)[0] == 200


REFUSED = {  # a body that is an object replaces fields of a valid request
    "nothing": [({}, 404, "POST /api/v1/nothing is not an endpoint")],
    "samplers/x": [({}, 405, "takes GET")],
    "training_runs/x/checkpoints/weights/a/publish": [({}, 405, "takes DELETE")],
    "forward_backward": [(b"\xff\xff", 422, "not a ForwardBackwardRequest")],
    "retrieve_future": [
        (b'{"a":' * 200_000, 422, "JSON"),
        ({"request_id": "x"}, 404, "request 'x' is unknown"),
        ({"request_id": "sample-000099"}, 404, "is unknown"),
    ],
    "cancel_future": [({"request_id": "x"}, 404, "request 'x' is unknown")],
    "optim_step": [
        (b"{", 422, "optim_step: Invalid JSON"),
        ([1], 422, "should be an object"),
        (b"[" * 200_000, 422, "JSON"),
        (b"{}", 422, "optim_step.model_id: Field required"),
        ({"model_id": 3}, 422, "optim_step.model_id: Input should be a valid string"),
        ({"model_id": "x"}, 404, "model 'x' is unknown"),
        ({"seq_id": -1}, 422, "seq_id is -1"),
        ({"adam_params": {"learning_rate": None}}, 422, "learning_rate"),
        *(({"adam_params": {"learning_rate": x}}, 400, "learning_rate") for x in (math.nan, 10**400, -1.0)),
        ({"adam_params": {"grad_clip_norm": True}}, 422, "grad_clip_norm"),
        # Another optimizer's numbers are never AdamW's.
        ({"optimizer_params": {"type": "dimuon", "learning_rate": 0.1, "beta1": 0.5}}, 400, "'dimuon'"),
    ],
    "create_model": [
        ({"session_id": "x"}, 404, "session 'x' is unknown"),
        ({"base_model": "big"}, 400, "this server has: toy"),
        ({"lora_config": {"rank": 500}}, 400, "limit is 128"),
        ({"lora_config": {"rank": 0}}, 400, "rank"),
        ({"optimizer_config": {"type": "dimuon"}}, 400, "adamw"),
    ],
    "create_sampling_session": [
        ({"base_model": None}, 400, "neither"),
        ({"base_model": "x"}, 400, "has: toy"),
        ({"model_path": "x"}, 400, "is not a checkpoint"),
        ({"model_path": "tinker://a/sampler_weights/b"}, 404, "tinker://a/sampler_weights/b does not exist"),
    ],
    "load_weights": [({"path": "tinker://a/weights/b", "optimizer": True}, 404, "does not exist")],
    "weights_info": [({"tinker_path": "/etc/passwd"}, 400, "is not a checkpoint")],
    "asample": [
        *(({"sampling_params": {name: x}}, 400, name) for name, x in [("max_tokens", 0), ("top_p", 0.0), ("top_k", 0)]),
        ({"sampling_params": {"temperature": -1.0}}, 400, "temperature"),
        ({"sampling_params": {"min_p": 2.0}}, 400, "min_p"),
        ({"sampling_params": {"stop": [""]}}, 400, "stop"),
        *(({"sampling_params": {"seed": seed}}, 422, "seed") for seed in (-1, 2**64)),
        *(({"num_samples": n}, 422, "num_samples") for n in (0, 4097)),
        ({"topk_prompt_logprobs": -1}, 422, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": -1}, 422, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 2}, 400, "prompt_alt_tokens_k is not offered"),
        *(
            ({"prompt_logprobs": x, "prompt_logprobs_last_n": n}, 400, "expected 1 to 1")
            for x, n in [(True, 2), (False, 1)]
        ),
        ({"prompt": {"chunks": []}}, 400, "at least one"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}, 400, "each an id >= 0"),
        ({"prompt": {"chunks": [{"type": "image_asset_pointer", "format": "png", "location": "x"}]}}, 400, "text only"),
    ]
    + [
        ({"target_prompt_logprobs": {"dtype": "int64", **tensor}}, status, "target_prompt_logprobs")
        for status, tensor in [
            (422, {"data": ["x"], "shape": [1, 1]}),
            (400, {"data": [10**30], "shape": [1, 1]}),
            (400, {"data": [1], "shape": None}),
            (400, {"data": [-1], "shape": [1, 1]}),
            (400, {"data": [-2], "shape": [1, 1]}),
            (400, {"data": [1, 2], "shape": [-1, -2]}),
            (400, {"data": [1, 2], "shape": [2, 1]}),
            (400, {"data": [1], "shape": [1, 3], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]}),
        ]
    ],
}


def test_refused(make):
    """With a status and one sentence that says what is wrong, by name; nothing is done."""
    client, wrong = make(), []
    every = {"session_id": client.session, "model_seq_id": 9, "sampling_session_seq_id": 9, "base_model": "toy"}
    every |= {"model_id": client.model(), "sampling_session_id": client.sampler(), "sampling_params": {}}
    every |= {"seq_id": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [65, 66]}]}}
    for path, cases in REFUSED.items():
        for body, status, message in cases:
            answer = client.ask("POST", path, every | body if isinstance(body, dict) else body)
            if answer.status_code != status or message not in answer.json()["detail"]:
                wrong.append((path, str(body)[:80], answer.status_code, answer.text))
    assert wrong == []
    assert client.ask("GET", "checkpoints?limit=x").status_code == 422
    assert [x.operation for x in client.service.applied] == ["create_model"]


def _make_sparse(shape, rows, columns=(0, 2)):
    def change(datum, tensor):
        tensor.ClearField("shape")
        tensor.shape.extend(shape)
        tensor.sparse_csr.values = np.array([4, 5], np.int64).tobytes()
        tensor.sparse_csr.crow_indices = np.array(rows, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()

    return change


BAD_DATUMS = [
    (lambda datum, _: datum.model_input[0].image.__setattr__("data", b"x"), "chunk of image"),
    (lambda datum, _: datum.ClearField("model_input"), "one row per token"),
    (lambda datum, _: datum.model_input[0].encoded_text.__setattr__("tokens", b"123"), "multiple of 4"),
    (lambda _, tensor: tensor.__setattr__("dtype", pb.DTYPE_BFLOAT16), "float32 or int64"),
    (lambda _, tensor: tensor.__setattr__("dense", b"1"), "multiple of 8"),
    (lambda _, tensor: tensor.shape.append(7), "for the shape [2, 7]"),
    (lambda _, tensor: tensor.sparse_csr.SetInParent(), "two dimensions"),
    (_make_sparse([2, 3], [0, 1, 5]), "indices do not fit"),
    (_make_sparse([2, 3], [1, 1, 2]), "indices do not fit"),
    (_make_sparse([3, 3], [0, 2, 1, 2]), "indices do not fit"),
    (_make_sparse([2, 3], [0, 1]), "indices do not fit"),
    (_make_sparse([2, 2], [0, 1, 2]), "indices do not fit"),
    (_make_sparse([2, 3], [0, 1, 2], [0, -1]), "indices do not fit"),
    (_make_sparse([2, 10**12], [0, 1, 2]), "bounded size"),
]


@for_each(("change", "message"), BAD_DATUMS)
def test_bad_datums(client, model, change, message):
    request = training_call(model, 1)
    change(request.data[0], request.data[0].loss_fn_inputs["target_tokens"])
    status, answer = client.post("forward_backward", request.SerializeToString())
    assert (status, message in answer["detail"]) == (400, True), answer


def test_a_key(monkeypatch):
    """Without it no request is answered, and the answer does not show it; with it web pages still are not."""
    monkeypatch.setattr("rlkit.server._serve.Server", lambda service, *address: service)  # no socket
    with rlkit.serve("toy", key="tml-secret-one") as service:
        Client(service, authorization="Bearer tml-secret-one")
        client = Client(service, **{"x-api-key": "tml-secret-one"})
        assert client.ask("GET", "healthz").json() == {"status": "ok"}
        for key in ("", "tml-secret", "tml-secret-two"):
            client.headers = {"x-api-key": key}
            status, answer = client.post("optim_step", b"x")
            assert (status, "secret" in str(answer)) == (401, False)
        client.headers = {"x-api-key": "tml-secret-one", "origin": "http://page.example"}
        assert client.ask("GET", "healthz").status_code == 403


def test_a_body_that_grows_too_large(make, monkeypatch):
    """Is refused while it is read, and not read again for its seq_id."""
    monkeypatch.setattr(_app, "_BODY_LIMIT", 1000)

    async def parts():
        for _ in range(20):
            yield b"x" * 100

    status, answer = make().post("optim_step", parts())
    assert (status, "at most 1000 bytes" in answer["detail"]) == (413, True)


def test_sessions(client):
    """One that was finished answers 410 and frees what it had; it may be finished twice."""
    model, sampler = client.model(), client.sampler()
    finish = f"sessions/{client.session}/finish"
    assert client.post(finish, {})[0] == 200
    assert client.step(model, 1)[0] == 410
    assert client.post("session_heartbeat", {"session_id": client.session})[0] == 410
    assert client.sample(sampler)[0] == 410
    assert client.post(finish, {})[0] == 200
    assert client.post("sessions/x/finish", {})[0] == 404
    assert client.service.samplers == {}
    until_freed(client, model)


def test_a_model_is_unloaded(client, model):
    """After what was asked for before, once; what is asked for after is refused at once, and samplers stay."""
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


def test_a_model_that_could_not_be_made(client, monkeypatch):
    """Its client learns why, and what follows fails with a hint to that."""
    monkeypatch.setattr(client.service.models, "create", lambda _: 1 / 0)
    accepted = client.post("create_model", {"session_id": client.session, "model_seq_id": 0, "base_model": "toy"})[1]
    assert client.result(accepted) == {"error": "ZeroDivisionError: division by zero", "category": "server"}
    assert "could not be created" in client.result(client.step(accepted["model_id"], 1))["error"]


def test_a_mistake_in_the_server_is_a_500(client, monkeypatch, caplog):
    """And does not show what went wrong to the client."""
    monkeypatch.setattr(client.service.saved, "list", lambda *_: 1 / 0)
    answer = client.ask("GET", "checkpoints")
    assert answer.status_code == 500
    assert answer.json() == {"detail": "ZeroDivisionError in the server; its log says more"}
    assert "GET /api/v1/checkpoints failed" in caplog.text


def test_silent_sessions_end(make, monkeypatch):
    """Their models are freed, though nobody else comes; one that gave a sign of life stays, and waiting is one."""
    monkeypatch.setattr(_app, "_GRACE", 0.1)
    client = make()
    service = client.service
    service.idle = 0.2

    async def play():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app)) as http:
            silent, alive = [
                (await http.post("http://localhost/api/v1/create_session", json=SESSION)).json()["session_id"]
                for _ in range(2)
            ]
        service.sessions[alive].last_seen += 1000.0
        async with asyncio.timeout(60):
            while not service.sessions[silent].finished:
                await asyncio.sleep(0.02)
        return service.sessions[alive].finished

    assert not asyncio.run(play())
    session = service.sessions[client.session]
    accepted = client.post("create_model", {"session_id": client.session, "model_seq_id": 0, "base_model": "toy"})
    session.last_seen = 0.0
    client.result(accepted)
    assert session.last_seen > 0.0


def test_what_waits_when_a_session_ends(client, monkeypatch):
    """For a request that never came: it is cancelled. A sampler that comes too late is not kept."""
    model, ready = client.model(), threading.Event()
    run = client.service.runs[model]
    run.worker.submit(ready.wait)
    snapshot = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    late, held = client.post("save_weights_for_sampler", snapshot)[1], client.step(model, 3)[1]
    client.post(f"sessions/{client.session}/finish", {})
    assert client.step(model, 2)[0] == 410
    ready.set()
    assert client.post("retrieve_future", {"request_id": held["request_id"]})[0] == 410
    assert "was finished" in client.result(late)["error"]
    assert client.service.samplers == {}


def test_what_a_client_is_told(make):
    """Losses run on its side; only a server that recognises repeats says so."""
    flags = {"pjwt_auth_enabled": False, "use_pyqwest_transport": False, "custom_loss_server_side": False}
    for dedupe, header in ((True, "1"), (False, None)):
        answer = make(dedupe=dedupe, config={"fwdbwd_max_chunk_len": 3}).ask("POST", "client/config")
        assert answer.headers.get("x-rlkit-deduplicates") == header
        assert answer.json() == {**flags, "fwdbwd_max_chunk_len": 3}


def test_options_that_the_sdk_has_no_fields_for(client, monkeypatch):
    """min_p and the penalties reach the sampler, which may refuse them by name, and are held to their ranges."""
    sampler, seen, sample = client.sampler(), [], ToySampler.sample
    monkeypatch.setattr(
        ToySampler, "sample", lambda s, p, params, **more: seen.append(params) or sample(s, p, params, **more)
    )
    for number, options in enumerate(({"min_p": 1.0, "top_p": 0.9}, {"presence_penalty": -2.0})):
        answer = client.result(client.sample(sampler, number, params=options))
        assert {name: getattr(seen[-1], name) for name in options} == options
        assert f"{min(options)}=" in str(answer)


def test_a_row_is_read_from_its_request_once():
    """Its arrays are its own and may be written to: a body's buffer is neither kept nor changed."""
    body = training_call("m", 1).SerializeToString()
    tokens, inputs = read_datum("data[0]", pb.ForwardBackwardRequest.FromString(body).data[0])
    for array in (tokens, inputs["target_tokens"]):
        array += 1
    np.testing.assert_array_equal(tokens, [2, 3])
    assert body == training_call("m", 1).SerializeToString()
