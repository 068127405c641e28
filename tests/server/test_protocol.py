"""The protocol without the SDK: requests are bytes, and the service answers."""

from __future__ import annotations

import concurrent.futures
import json
import time

import pytest

from rlkit.backends.toy import ToySampler
from rlkit.server import ExactModels, Service

pytest.importorskip("tinker")
from tinker.proto import tinker_public_pb2 as pb

from tests.each import for_each


class Client:
    """Requests of one session and one model."""

    def __init__(self, service, headers=None):
        self.service = service
        self.headers = headers or {}
        self.session = self.post("create_session", {})[1]["session_id"]

    def post(self, path, body, *, method="POST", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self.service.handle(method, f"/api/v1/{path}", {**self.headers, **headers}, data)
        text = answer.headers["content-type"] == "application/json"
        return answer.status, json.loads(answer.body) if text else answer.body

    def model(self, number=0, **options):
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "toy", **options}
        status, accepted = self.post("create_model", body)
        assert status == 200, accepted
        return self.result(accepted["request_id"])[1]["model_id"]

    def result(self, request_id, seconds=10.0):
        body = json.dumps({"request_id": request_id}).encode()
        waiting = self.service.waits_for("/api/v1/retrieve_future", body)
        if waiting is not None:
            concurrent.futures.wait([waiting[0]], min(seconds, waiting[1]))
        return self.post("retrieve_future", body)

    def step(self, model, seq_id, **params):
        params = {"learning_rate": 0.1, **params}
        return self.post("optim_step", {"model_id": model, "seq_id": seq_id, "adam_params": params})


@pytest.fixture
def make():
    made = []

    def new(**options):
        made.append(Service(ExactModels(), names=["toy"], seed=0, **options))
        return Client(made[-1])

    yield new
    for service in made:
        service.close()


def steps(client):
    return [x.seq_id for x in client.service.applied if x.operation == "optim_step"]


def call(model, seq_id, tokens=(1, 2), targets=(2, 3), *, forward_only=False):
    import numpy as np

    message = pb.ForwardBackwardRequest(
        model_id=model, seq_id=seq_id, loss_fn="cross_entropy", forward_only=forward_only
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.dense = pb.DTYPE_INT64, np.array(targets, np.int64).tobytes()
    tensor.shape.append(len(targets))
    return message


def test_requests_are_carried_out_in_the_clients_order(make):
    """Whatever order they arrive in."""
    client = make()
    model = client.model()
    third = client.step(model, 3)[1]["request_id"]
    second = client.step(model, 2)[1]["request_id"]
    assert client.post("retrieve_future", {"request_id": second}) == (
        408,
        {"detail": "not yet", "type": "try_again", "request_id": second, "queue_state": "active"},
    )
    first = client.step(model, 1)[1]["request_id"]
    for request_id in (third, second, first):
        assert client.result(request_id)[0] == 200
    assert steps(client) == [1, 2, 3]


def test_a_request_that_never_comes(make):
    """What waits for it fails in the end, and says what it waited for."""
    client = make(patience=0.05)
    model = client.model()
    request_id = client.step(model, 2)[1]["request_id"]
    status, answer = client.result(request_id)
    assert status == 200
    assert answer["category"] == "user"
    assert "seq_id 1" in answer["error"]
    client.result(client.step(model, 1)[1]["request_id"])
    assert steps(client) == [1]  # what was given up is not carried out later


def test_a_request_that_comes_twice(make):
    """Is carried out once and gets the first one's id; another request cannot take its number."""
    client = make()
    model = client.model()
    first, again = client.step(model, 1)[1], client.step(model, 1)[1]
    assert first == again
    assert client.result(first["request_id"]) == client.result(first["request_id"])
    assert steps(client) == [1]
    status, answer = client.post("forward_backward", call(model, 1).SerializeToString())
    assert status == 400
    assert "already belongs to a optim_step" in answer["detail"]
    assert client.model() == model


def test_a_server_that_does_not_recognise_repeats(make):
    client = make(dedupe=False)
    model = client.model()
    ids = [client.step(model, 1)[1]["request_id"] for _ in range(2)]
    assert ids[0] != ids[1]
    assert [client.result(x)[0] for x in ids] == [200, 200]
    assert steps(client) == [1, 1]


def test_a_refused_request_has_had_its_turn(make):
    """The next one is carried out; sent again with the same number and better contents it is, too."""
    client = make()
    model = client.model()
    assert client.step(model, 1, learning_rate=-1)[0] == 400
    client.result(client.step(model, 2)[1]["request_id"])
    client.result(client.step(model, 1)[1]["request_id"])
    assert steps(client) == [2, 1]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("save_weights_somewhere", {}),
        ("optim_step", {"adam_params": 3}),
        ("samplers/x", {}),
        ("save_weights", {"path": "a/b"}),
        ("load_weights", {"path": "tinker://a/weights/b", "optimizer": True}),
        ("optim_step", {"adam_params": {"beta1": 7.0}}),
    ],
)
def test_wherever_it_was_refused(make, path, more):
    """What comes behind does not wait for it, be it that the endpoint is not there or that a field is wrong."""
    client = make(patience=0.3)
    model = client.model()
    assert client.post(path, {"model_id": model, "seq_id": 1, **more})[0] in (400, 404, 405, 422)
    answer = client.result(client.step(model, 2)[1]["request_id"])[1]
    assert "metrics" in answer, answer
    assert steps(client) == [2]


def test_a_refused_copy_of_a_request_that_waits(make):
    """Does not take its turn: another request under a number that is held is refused, and that one is carried out."""
    client = make()
    model = client.model()
    waiting = client.step(model, 2)[1]["request_id"]
    assert client.post("nothing", {"model_id": model, "seq_id": 2})[0] == 404
    client.result(client.step(model, 1)[1]["request_id"])
    assert "metrics" in client.result(waiting)[1]
    assert steps(client) == [1, 2]


def test_old_results_are_gone_and_never_repeated(make, monkeypatch):
    from rlkit.server import _state

    monkeypatch.setattr(_state, "_KEPT", 2)
    client = make()
    model = client.model()
    ids = [client.step(model, seq_id)[1]["request_id"] for seq_id in range(1, 6)]
    for request_id in ids:
        assert client.result(request_id)[0] == 200
    assert client.result(ids[0])[0] == 410
    assert client.result(ids[4])[0] == 200
    assert client.step(model, 1)[0] == 410
    assert steps(client) == [1, 2, 3, 4, 5]


def test_a_failed_call_adds_nothing(make):
    """And what follows is carried out, as the real service does."""
    client = make()
    model = client.model()
    bad = client.post("forward_backward", call(model, 1, targets=(2, 400)).SerializeToString())[1]
    step = client.step(model, 2)[1]
    answer = client.result(bad["request_id"])
    assert answer[0] == 200
    assert answer[1]["category"] == "user"
    assert "[0, 258]" in answer[1]["error"]
    assert client.result(step["request_id"])[1] == {"metrics": {"grad_norm:mean": 0.0}}


@for_each(
    ("path", "body", "status", "message"),
    [
        ("nothing", {}, 404, "not an endpoint"),
        ("samplers/x", {}, 405, "takes GET"),
        ("optim_step", b"{", 422, "not JSON"),
        ("optim_step", [1], 422, "expected an object"),
        ("optim_step", b"[" * 200_000, 422, "not JSON"),
        ("retrieve_future", b'{"a":' * 200_000, 422, "not JSON"),
        ("create_session", b"1" * 10_000, 422, "not JSON"),
        ("optim_step", {}, 422, "'model_id' is missing"),
        ("optim_step", {"model_id": 3}, 422, "'model_id' is a JSON int"),
        ("optim_step", {"model_id": "x"}, 404, "model 'x' is unknown"),
        ("forward_backward", b"\xff\xff", 422, "not a ForwardBackwardRequest"),
        ("retrieve_future", {"request_id": "x"}, 404, "request 'x' is unknown"),
        ("cancel_future", {"request_id": "x"}, 404, "request 'x' is unknown"),
        ("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": "toy"}, 404, "session 'x' is unknown"),
        ("create_model", {"model_seq_id": 9, "base_model": "big"}, 400, "this server has: toy"),
        ("create_model", {"model_seq_id": 9, "base_model": "toy", "lora_config": {"rank": 500}}, 400, "limit is 128"),
        ("create_model", {"model_seq_id": 9, "base_model": "toy", "lora_config": {"rank": 0}}, 422, "'rank' is 0"),
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
        ("asample", {"sampling_session_id": "x", "seq_id": 0}, 404, "session 'x' is unknown"),
    ],
)
def test_refused(make, path, body, status, message):
    """With a status and one sentence that says what is wrong."""
    client = make()
    if isinstance(body, dict) and ("model_seq_id" in body or "sampling_session_seq_id" in body):
        body = {"session_id": client.session, **body}
    found, answer = client.post(path, body)
    assert found == status
    assert message in answer["detail"]


@for_each(
    "params",
    [
        {"learning_rate": None},
        {"learning_rate": float("nan")},
        {"learning_rate": -1.0},
        {"beta1": 1.0},
        {"eps": 0.0},
        {"eps": "small"},
        {"grad_clip_norm": True},
        {"learning_rate": 10**400},
        {"learning_rate": -(10**400)},
        {"learning_rate": float("inf")},
    ],
)
def test_bad_optimizer_settings(make, params):
    client = make()
    model = client.model()
    status, answer = client.step(model, 1, **params)
    assert status in (400, 422)
    assert next(iter(params)) in answer["detail"]
    assert steps(client) == []


def test_default_optimizer_settings(make):
    """What the client leaves out is the API's default."""
    client = make()
    model = client.model()
    client.result(client.post("forward_backward", call(model, 1).SerializeToString())[1]["request_id"])
    weights = client.service.backend(model)._weights
    before = weights.value
    client.result(client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})[1]["request_id"])
    assert abs(abs(weights.value - before).max() - 1e-4) < 1e-8
    status, answer = client.post("optim_step", {"model_id": model, "seq_id": 3, "optimizer_params": {"type": "dimuon"}})
    assert status == 400
    assert "'dimuon'" in answer["detail"]


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
    ],
)
def test_bad_messages(make, change, message):
    client = make()
    model = client.model()
    request = call(model, 1)
    change(request)
    status, answer = client.post("forward_backward", request.SerializeToString())
    assert status == 400
    assert message in answer["detail"]


@pytest.mark.parametrize("index", [[0, 1, 5], [1, 1, 2], [0, 2, 1], [0, 1]])
def test_bad_sparse_indices(make, index):
    import numpy as np

    client = make()
    request = call(client.model(), 1)
    tensor = request.data[0].loss_fn_inputs["target_tokens"]
    tensor.ClearField("shape")
    tensor.shape.extend([2, 3])
    tensor.sparse_csr.values = np.array([4, 5], np.int64).tobytes()
    tensor.sparse_csr.crow_indices = np.array(index, np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.array([0, 2], np.int64).tobytes()
    status, answer = client.post("forward_backward", request.SerializeToString())
    assert status == 400
    assert "indices do not fit" in answer["detail"]


def test_huge_sparse_shape(make):
    """A few bytes cannot ask for a matrix that fills the memory."""
    client = make()
    request = call(client.model(), 1)
    tensor = request.data[0].loss_fn_inputs["target_tokens"]
    tensor.ClearField("shape")
    tensor.shape.extend([2, 10**12])
    tensor.sparse_csr.values = b""
    status, answer = client.post("forward_backward", request.SerializeToString())
    assert (status, "bounded size" in answer["detail"]) == (400, True)


def test_keys():
    """With keys, no request is answered without one of them, and the answer does not show them."""
    with Service(ExactModels(), names=["toy"], keys=["tml-secret-one", "tml-secret-two"]) as service:
        for headers, status in (
            ({}, 401),
            ({"X-API-Key": "tml-secret"}, 401),
            ({"x-api-key": "tml-secret-one"}, 200),
            ({"X-API-KEY": "tml-secret-two"}, 200),
        ):
            answer = service.handle("GET", "/api/v1/healthz", headers, b"")
            assert answer.status == status
            assert b"secret" not in answer.body


def test_sessions(make):
    """A repeated creation under one key is one session; a finished one answers 410 and frees what it had."""
    client = make()
    ids = {client.post("create_session", {}, **{"X-Idempotency-Key": key})[1]["session_id"] for key in "aab"}
    assert len(ids) == 2
    assert client.post("session_heartbeat", {"session_id": client.session})[0] == 200
    model = client.model()
    assert client.post(f"sessions/{client.session}/finish", {})[0] == 200
    assert client.post("session_heartbeat", {"session_id": client.session})[0] == 410
    assert client.step(model, 1)[0] == 410
    until_freed(client, model)


def test_sessions_are_listed(make):
    """With what belongs to each; other parts of a path lead nowhere."""
    client = make()
    model = client.model()
    sampler = client.post(
        "create_sampling_session", {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "toy"}
    )[1]["sampling_session_id"]
    other = client.post("create_session", {"user_metadata": {"who": "me"}})[1]["session_id"]
    assert client.post("sessions", b"", method="GET")[1] == {"sessions": [other, client.session]}
    assert client.post("sessions?limit=1&offset=1", b"", method="GET")[1] == {"sessions": [client.session]}
    assert client.post("sessions?limit=x", b"", method="GET")[0] == 422
    found = client.post(f"sessions/{client.session}", b"", method="GET")[1]
    assert found == {"training_run_ids": [model], "sampler_ids": [sampler], "user_metadata": None}
    assert client.post(f"sessions/{other}", b"", method="GET")[1]["user_metadata"] == {"who": "me"}
    assert client.post("sessions/x", b"", method="GET")[0] == 404
    status, answer = client.post(f"training_runs/{model}/whatever", b"", method="GET")
    assert (status, "not an endpoint" in answer["detail"]) == (404, True)


def test_a_model_is_unloaded(make):
    """Behind what was asked for before, once; what is asked for after is refused at once, and samplers stay."""
    client = make()
    model = client.model()
    snapshot = client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0})
    step = client.step(model, 2)[1]["request_id"]
    first, again = (client.post("unload_model", {"model_id": model})[1] for _ in range(2))
    assert first == again
    assert client.result(first["request_id"])[1] == {"model_id": model, "type": "unload_model"}
    assert "metrics" in client.result(step)[1]
    assert client.step(model, 3)[0] == 410
    sampler = client.result(snapshot[1]["request_id"])[1]["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [65]}]}
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    assert client.result(client.post("asample", asked)[1]["request_id"])[0] == 200
    until_freed(client, model)


def until_freed(client, model):
    """Waits for the model's own thread to let go of it."""
    end = time.monotonic() + 30
    while client.service._state.runs[model].model is not None:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_nothing_is_published(make, method):
    client = make()
    path = f"training_runs/{client.model()}/checkpoints/weights/a/publish"
    assert client.post(path, b"", method=method) == (
        400,
        {"detail": "publishing: this server has only one user and does not publish"},
    )


@for_each(
    "tensor",
    [
        {"data": ["x"], "shape": [1, 1]},
        {"data": [10**30], "shape": [1, 1]},
        {"data": [1], "shape": ["a"]},
        {"data": [1], "shape": []},
        {"data": [1, 2], "shape": [-1, -2]},
        {"data": [[1], [2, 3]], "shape": [1, 1]},
        {"data": [1], "shape": [1, 3], "sparse_crow_indices": [0.5, 1], "sparse_col_indices": [0]},
        {"data": [1], "shape": [1, 3], "sparse_crow_indices": [], "sparse_col_indices": []},
        {"data": [1], "shape": [10**40, 3], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]},
    ],
)
def test_bad_targets_of_prompts(make, tensor):
    """Are refused by name, whatever they are."""
    client = make()
    sampler = client.post(
        "create_sampling_session", {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "toy"}
    )[1]["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [65, 66]}]}
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    status, answer = client.post("asample", {**asked, "target_prompt_logprobs": tensor})
    assert status == 400
    assert "target_prompt_logprobs" in answer["detail"]


def test_paths_behind_a_prefix(make):
    """A base URL may have a path of its own."""
    client = make()
    assert client.service.handle("GET", "/services/x/api/v1/healthz?a=b", {}, b"").status == 200


def test_a_mistake_in_the_server_is_a_500(make, monkeypatch, caplog):
    """And does not show what went wrong to the client."""
    client = make()
    monkeypatch.setattr(client.service._state.checkpoints, "all", lambda *_: 1 / 0)
    status, answer = client.post("checkpoints", b"", method="GET")
    assert status == 500
    assert "ZeroDivisionError" in answer["detail"]
    assert "checkpoints failed" in caplog.text


def test_same_seed_same_ids():
    """Session ids and unseeded samples depend on the seed alone."""
    ids = []
    for seed in (0, 0, 1):
        with Service(ExactModels(), names=["toy"], seed=seed) as service:
            ids.append(Client(service).session)
    assert ids[0] == ids[1] != ids[2]


def test_idle_sessions_end(make):
    """Their models are freed when the next client comes; one that gives signs of life stays."""
    client = make(idle=600.0)
    model = client.model()
    alive = client.post("create_session", {})[1]["session_id"]
    sessions = client.service._state.sessions
    for _ in range(5):  # two minutes each
        for session in (client.session, alive):
            sessions[session].last_seen -= 130.0
        assert client.post("session_heartbeat", {"session_id": alive})[0] == 200
    client.post("create_session", {})
    assert client.post("session_heartbeat", {"session_id": alive})[0] == 200
    assert client.step(model, 1)[0] == 410


def test_options_that_the_sdk_has_no_fields_for(make, monkeypatch):
    """min_p and the penalties reach the sampler, which may refuse them by name, and are held to their ranges."""
    client, seen, sample = make(), [], ToySampler.sample

    def recorded(self, prompt, params, **given):
        seen.append(params)
        return sample(self, prompt, params, **given)

    monkeypatch.setattr(ToySampler, "sample", recorded)
    session = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = client.post("create_sampling_session", session)[1]["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [65, 66]}]}
    asked = {"sampling_session_id": sampler, "prompt": prompt, "num_samples": 4}
    for number, options in enumerate(({"temperature": 0.0}, {"min_p": 1.0, "top_p": 0.9}, {"presence_penalty": -2.0})):
        params = {"max_tokens": 6, "seed": 1, "stop": [], **options}
        accepted = client.post("asample", {**asked, "seq_id": number, "sampling_params": params})[1]
        answer = client.result(accepted["request_id"])[1]
        assert {name: getattr(seen[-1], name) for name in options} == options
        if number == 0:
            assert len(pb.SampleResponse.FromString(answer).sequences) == 4
        else:
            assert f"{min(options)}=" in str(answer)
    status, answer = client.post("asample", {**asked, "seq_id": 9, "sampling_params": {"min_p": 2.0}})
    assert (status, "min_p" in answer["detail"]) == (400, True)
