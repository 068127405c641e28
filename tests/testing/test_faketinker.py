"""FakeTinker: the SDK's own client, faults that do what they say, counts that tell what was really done."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib
import inspect
import json
import threading
import time

import numpy as np
import pytest

import rlkit
from tests.each import for_each
from tests.server.sdk import datum, prompt

tinker = pytest.importorskip("tinker")
httpx = pytest.importorskip("httpx")
from tinker import types  # noqa: E402

from rlkit.testing import FakeTinker, Fault, _faketinker  # noqa: E402

DATA = [datum(list(b"hello world"), weights=1.0)]
STEP = types.AdamParams(learning_rate=0.05)


def started(fake):
    return fake.service_client().create_lora_training_client("toy", rank=8).result()


def steps(fake, expected):
    """How many steps were applied, once as many as expected were or some time has passed."""
    deadline = time.monotonic() + (5.0 if expected else 0.1)
    while time.monotonic() < deadline and (fake.count("optim_step") < expected or not expected):
        time.sleep(0.005)
    return fake.count("optim_step")


def outcome(future, seconds=20.0):
    """The result, or the exception."""
    try:
        return future.result(timeout=seconds)
    except Exception as error:
        return error


# The contract with the SDK.

SIGNATURES = {
    ("tinker", "ServiceClient.__init__"): "user_metadata project_id display_name base_url api_key",
    ("tinker", "ServiceClient.create_lora_training_client"): "base_model rank seed train_mlp train_attn train_unembed",
    ("tinker", "ServiceClient.create_training_client_from_state"): "path base_model optimizer",
    ("tinker", "ServiceClient.create_training_client_from_state_with_optimizer"): "path base_model",
    ("tinker", "ServiceClient.create_sampling_client"): "model_path base_model retry_config",
    ("tinker", "ServiceClient.close"): "status detail",
    ("tinker", "TrainingClient.forward"): "data loss_fn loss_fn_config",
    ("tinker", "TrainingClient.forward_backward"): "data loss_fn loss_fn_config",
    ("tinker", "TrainingClient.forward_backward_custom"): "data loss_fn",
    ("tinker", "TrainingClient.optim_step"): "optim_params",
    ("tinker", "TrainingClient.save_state"): "name ttl_seconds overwrite user_metadata",
    ("tinker", "TrainingClient.save_weights_for_sampler"): "name ttl_seconds user_metadata",
    ("tinker", "TrainingClient.save_weights_and_get_sampling_client"): "retry_config kind",
    ("tinker", "TrainingClient.get_info"): "",
    ("tinker", "TrainingClient.get_tokenizer"): "",
    ("tinker", "SamplingClient.sample"): "prompt num_samples sampling_params include_prompt_logprobs "
    "topk_prompt_logprobs topk_sample_logprobs target_prompt_logprobs prompt_alt_tokens_k prompt_logprobs_last_n",
    ("tinker", "SamplingClient.compute_logprobs"): "prompt prompt_logprobs_last_n",
    ("tinker", "RestClient.__init__"): "base_url api_key",
    ("tinker.lib.internal_client_holder", "AsyncTinker.__init__"): "base_url http_client _auth _client_config",
    ("tinker.lib.internal_client_holder", "init_telemetry"): "tinker_provider session_id",
    ("tinker.lib.public_interfaces.training_client", "_load_tokenizer_from_model_info"): "model_name tokenizer_id",
    ("tinker.lib.public_interfaces.sampling_client", "_load_tokenizer_from_model_info"): "model_name tokenizer_id",
}
FIELDS = {
    "AdamParams": {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0,
        "grad_clip_norm": 0,
    },
    "SamplingParams": {"max_tokens": None, "seed": None, "stop": None, "temperature": 1, "top_k": -1, "top_p": 1},
}


@for_each(("module", "name"), SIGNATURES)
def test_the_sdk_has_what_is_used(module, name):
    """Fails where an SDK update has moved or renamed what rlkit calls or replaces."""
    value = importlib.import_module(module)
    for part in name.split("."):
        value = inspect.unwrap(getattr(value, part))  # rlkit's own guard may stand before it
    parameters = inspect.signature(value).parameters
    missing = [p for p in SIGNATURES[module, name].split() if p not in parameters]
    assert not missing, (
        f"tinker {tinker.__version__}: {module}.{name} has no parameter {missing}; it has {list(parameters)}"
    )


def test_the_sdk_has_the_defaults_that_are_known():
    assert {name: getattr(types, name)().model_dump() for name in FIELDS} == FIELDS


def test_the_seam_is_replaced_and_put_back():
    """Only while a fake is open, only for its clients, and not for one that is given an HTTP client."""

    def names():
        return [getattr(importlib.import_module(m), n) for m, n in _faketinker._REPLACED]

    before = names()
    with FakeTinker() as one, FakeTinker() as two:
        assert all(a is not b for a, b in zip(before, names(), strict=True))
        started(one)
        started(two)
        assert one.count("create_model") == two.count("create_model") == 1
        make = importlib.import_module("tinker.lib.internal_client_holder").AsyncTinker
        other = make(base_url="http://127.0.0.1:9", api_key="tml-x")
        assert "Mock" not in type(other._client._transport).__name__
        given = httpx.AsyncClient()
        assert make(base_url=one.base_url, api_key="tml-x", http_client=given)._client is given
    assert before == names()


def test_a_moved_seam_says_so(monkeypatch):
    moved = {**_faketinker._REPLACED, ("tinker.lib.internal_client_holder", "Moved"): print}
    monkeypatch.setattr(_faketinker, "_REPLACED", moved)
    with pytest.raises(rlkit.UnsupportedError, match=r"FakeTinker needs tinker .*Moved"), FakeTinker():
        pass
    assert not _faketinker._originals


def test_it_wants_to_be_open():
    fake = FakeTinker()
    with pytest.raises(rlkit.ConfigError, match="with FakeTinker"):
        fake.service_client()
    with fake, pytest.raises(rlkit.ConfigError, match="open already"):
        fake.open()
    fake.close()


# What it leaves behind.


def test_nothing_is_left():
    """No threads but the SDK's own, no open sessions, and no telemetry was sent."""
    with FakeTinker() as fake:
        training = started(fake)
        training.forward_backward_custom(DATA, lambda data, lps: (sum(lp.sum() for lp in lps), {})).result()
    before = {t.name for t in threading.enumerate()}
    for _ in range(3):
        with FakeTinker() as fake:
            training = started(fake)
            training.forward_backward(DATA, "cross_entropy").result()
            sampler = training.save_weights_and_get_sampling_client().result()
            sampler.sample(prompt([65]), 4, types.SamplingParams(max_tokens=3)).result()
    gc.collect()
    assert {t.name for t in threading.enumerate()} <= before  # threads of earlier tests may end meanwhile
    assert fake.requests[-1].endpoint == "finish_session"
    assert not any(x.endpoint == "telemetry" for x in fake.requests)
    assert all(s.finished for s in fake.service.sessions.values())


def test_closing_ends_faults_first():
    """A server that is dead when the block ends does not hold it up."""
    start = time.monotonic()
    with FakeTinker() as fake:
        started(fake)
        fake.inject(Fault("500", times=None))
        fake.latency = 240.0
    assert time.monotonic() - start < 120


def test_tokenizer():
    """Without a hub: both clients give the model's own, in the form that users of the SDK know."""
    with FakeTinker() as fake:
        training = started(fake)
        for client in (training, training.save_weights_and_get_sampling_client().result()):
            tokenizer = client.get_tokenizer()
            assert tokenizer.decode(tokenizer.encode("hé")) == "hé"
            assert isinstance(tokenizer.encode("a"), list)
            assert tokenizer.eos_token_id == 257
            chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=True)
            assert tokenizer.decode(chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert fake.tokenizer.decode(fake.tokenizer.encode("x")) == "x"


def test_awaiting():
    """From asynchronous code, with calls in flight together."""

    async def run(fake):
        training = await fake.service_client().create_lora_training_client("toy")
        calls = [training.forward_backward(DATA, "cross_entropy"), training.optim_step(STEP)]
        results = [await call for call in calls]
        sampler = await training.save_weights_and_get_sampling_client()
        samples = await asyncio.gather(*(sampler.compute_logprobs(prompt([65, k])) for k in range(10)))
        return results, samples

    with FakeTinker() as fake:
        results, samples = asyncio.run(run(fake))
    assert results[0].metrics["loss:sum"] > 0
    assert len(samples) == 10


# The same model as the toy backend's.


def test_the_curve_of_the_toy_backend(tmp_path):
    """Losses by name, masks, samples and steps: the same numbers as ToyBackend's, through another door."""
    params = rlkit.SamplingParams(max_tokens=8, stop=())
    adam = {"learning_rate": 0.05, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
    with FakeTinker() as fake, rlkit.connect("toy", folder=tmp_path) as toy:
        training = started(fake)
        worst = 0.0
        for step in range(10):
            here = toy.sampler().result().sample([65, 66, 67], params, n=8, seed=step).result()
            sampler = training.save_weights_and_get_sampling_client().result()
            options = types.SamplingParams(max_tokens=8, stop=[], seed=step)
            there = sampler.sample(prompt([65, 66, 67]), 8, options).result().sequences
            assert [s.tokens for s in there] == [s.tokens.tolist() for s in here]
            rewards = np.array([np.mean(s.tokens == 101) for s in here])
            advantages = rewards - rewards.mean() + 0.1
            data = [s.datum(a, sampling_logprobs=s.logprobs - 0.05) for s, a in zip(here, advantages, strict=True)]
            sent = [
                datum([65, 66, 67, *s.tokens], start=3, logprobs=np.array(s.logprobs, np.float32) - 0.05, advantages=a)
                for s, a in zip(there, advantages, strict=True)
            ]
            name = ("importance_sampling", "ppo", "cispo")[step % 3]
            a, b = toy.forward_backward(data, name), training.forward_backward(sent, name)
            norm = toy.optim_step(rlkit.Adam(**adam)).result()["grad_norm:mean"]
            assert training.optim_step(types.AdamParams(**adam)).result().metrics["grad_norm:mean"] == pytest.approx(
                norm
            )
            assert b.result().metrics["loss:sum"] == pytest.approx(a.result().metrics["loss:sum"], rel=1e-5, abs=1e-5)
            weights = fake.service.runs[training.model_id].model.backend._weights.value
            worst = max(worst, np.abs(weights - toy._weights.value).max())
    assert worst < 1e-9


# Delivery, chunks, latency.


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("limit", [{"fwdbwd_max_chunk_len": 4}, {"fwdbwd_max_chunk_bytes_count": 250}])
def test_chunks(parallel, limit):
    """A call that is cut into requests, the first of which comes last, is put together in order and summed."""
    data = [datum([k, k + 1, k + 2] * (1 + k % 3), weights=1.0) for k in range(10)]
    with FakeTinker() as whole, FakeTinker(config={"parallel_fwdbwd_chunks": parallel, **limit}) as cut:
        found = []
        for fake in (whole, cut):
            training = started(fake)
            result = training.forward_backward(data, "cross_entropy").result()
            training.optim_step(STEP).result()
            found.append((result, fake.service.runs[training.model_id].model.backend._weights.value))
        assert whole.count("forward_backward") == 1
        assert cut.count("forward_backward") >= 3
        seq_ids = [x.seq_id for x in cut.applied if x.operation == "forward_backward"]
        assert seq_ids == sorted(seq_ids)
        for a, b in zip(found[0][0].loss_fn_outputs, found[1][0].loss_fn_outputs, strict=True):
            np.testing.assert_array_equal(a["logprobs"].to_numpy(), b["logprobs"].to_numpy())
        assert found[0][0].metrics["loss:sum"] == pytest.approx(found[1][0].metrics["loss:sum"], rel=1e-6)
        np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-9)


def test_latency():
    """Each request takes longer by it."""
    with FakeTinker(latency=0.1) as fake:
        training, start, before = started(fake), time.monotonic(), len(fake.requests)
        training.optim_step(STEP).result()
        asked = len(fake.requests) - before
        assert time.monotonic() - start >= 0.1 * asked
        assert asked >= 2


def test_two_servers_in_one_process():
    """A fake on the SDK's own loop, and a server on another one, of one program: their results are apart."""
    with FakeTinker() as fake, rlkit.serve("toy") as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
        trainings = [started(fake), client.create_lora_training_client("toy").result()]
        calls = [t.forward_backward(DATA, "cross_entropy") for _ in range(5) for t in trainings]
        losses = {call.result(timeout=30).metrics["loss:sum"] for call in calls}
        assert len(losses) == 1
        client.close("success").result()


# Faults.

RETRIED = ("429", "500", "503", "lost", "slow")
PASSED_ON = {
    "401": "AuthenticationError",
    "404": "NotFoundError",
    "410": "APIStatusError",
    "bad_json": "JSONDecodeError",
}


def side_by_side(work, items):
    """``work(item)`` for all items at once, since each waits for the SDK's pauses."""
    with concurrent.futures.ThreadPoolExecutor(len(items)) as pool:
        list(pool.map(work, items))


@pytest.mark.parametrize("when", ["before", "after"])
def test_faults_of_a_step(when):
    """The SDK repeats what may pass, and the step is applied once; the rest it passes on, applied or not."""

    def work(kind):
        with FakeTinker(faults=[Fault(kind, "optim_step", when=when, seconds=0.2)]) as fake:
            result = outcome(started(fake).optim_step(STEP))
            if kind in RETRIED:
                assert isinstance(result, types.OptimStepResponse), (kind, result)
                assert steps(fake, 1) == 1, kind
            else:
                assert type(result).__name__ == PASSED_ON[kind], (kind, result)
                assert steps(fake, when == "after") == (when == "after"), kind
            assert fake.repeated_operations() == []

    side_by_side(work, [*RETRIED, *PASSED_ON])


@pytest.mark.parametrize("when", ["before", "after"])
def test_faults_of_a_result(when):
    """Whatever happens to the answer, the step is applied, once."""
    passed_on = {"401": ValueError, "404": ValueError, "410": Exception, "bad_json": json.JSONDecodeError}

    def work(kind):
        fault = Fault(kind, "retrieve_future", when=when, operation="optim_step", seconds=0.2)
        with FakeTinker(faults=[fault]) as fake:
            result = outcome(started(fake).optim_step(STEP))
            assert isinstance(result, passed_on.get(kind, types.OptimStepResponse)), (kind, result)
            assert steps(fake, 1) == 1, kind
            assert [x.fault for x in fake.requests].count(fault) == 1

    side_by_side(work, [*RETRIED, *passed_on])


@pytest.mark.parametrize("endpoint", ["create_session", "create_model", "get_info", "forward_backward", "asample"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_faults_anywhere(endpoint, when):
    """A failure of any request is survived, and nothing is done twice."""
    with FakeTinker(faults=[Fault("503", endpoint, when=when)]) as fake:
        training = started(fake)
        training.forward_backward(DATA, "cross_entropy").result()
        assert training.optim_step(STEP).result().metrics["grad_norm:mean"] > 0
        sampler = training.save_weights_and_get_sampling_client().result()
        sampler.sample(prompt([65]), 1, types.SamplingParams(max_tokens=2)).result()
        assert fake.repeated_operations() == []
        assert [fake.count(x) for x in ("create_model", "forward_backward", "optim_step", "sample")] == [1, 1, 1, 1]


def test_a_lost_answer_without_deduplication():
    """The trap itself: the SDK repeats the step, and such a server takes it twice."""
    with FakeTinker(dedupe=False, faults=[Fault("lost", "optim_step", when="after")]) as fake:
        training = started(fake)
        training.optim_step(STEP).result()
        assert fake.count("optim_step") == 2
        assert [x.operation for x in fake.repeated_operations()] == ["optim_step"]


def test_skipping_and_repeating():
    """The third and fourth of all results are late; everything else is as it was."""
    fault = Fault("503", "get_info", skip=2, times=2)
    with FakeTinker(faults=[fault]) as fake:
        service = fake.service_client()
        for _ in range(3):
            service.create_lora_training_client("toy").result()
        assert [x.fault for x in fake.requests if x.endpoint == "get_info"] == [None, None, fault, fault, None]


def test_a_dead_server():
    """Fails until it is healed."""
    with FakeTinker() as fake:
        training = started(fake)
        fake.inject(Fault("lost", times=None))
        first = len(fake.requests)
        step = training.optim_step(STEP)
        began = time.monotonic()
        while len(fake.requests) < first + 2:
            with pytest.raises(TimeoutError):
                step.result(timeout=0.1)
        assert fake.count("optim_step") == 0
        seen = fake.requests[first:]
        assert len(seen) <= 2 + (time.monotonic() - began) / 0.3
        assert all(x.fault is not None and x.endpoint == "optim_step" for x in seen)
        fake.heal()
        assert isinstance(outcome(step), types.OptimStepResponse)
        assert fake.count("optim_step") == 1


def test_a_paused_queue(caplog):
    """The SDK says so and goes on when it is over."""
    fault = Fault("paused", "retrieve_future", operation="sample", times=3, seconds=0.05)
    with FakeTinker(faults=[fault]) as fake:
        sampler = started(fake).save_weights_and_get_sampling_client().result()
        assert sampler.compute_logprobs(prompt([1, 2])).result()[0] is None
        assert "a requested fault" in caplog.text
        assert [x.fault for x in fake.requests if x.operation == "sample"] == [fault, fault, fault, None]


def test_an_expired_session():
    with FakeTinker() as fake:
        training = started(fake)
        fake.expire()
        error = outcome(training.optim_step(STEP))
        assert isinstance(error, tinker.APIStatusError)
        assert error.status_code == 410


def test_a_slow_answer_beyond_the_clients_patience():
    """Is a timeout, without the minutes that the client would wait."""

    async def ask(fake, fault):
        fake.inject(fault)
        timeout = {"timeout": {"read": 0.05}}
        return await fake.respond(httpx.Request("POST", f"{fake.base_url}/api/v1/telemetry", extensions=timeout))

    with FakeTinker() as fake, pytest.raises(httpx.ReadTimeout, match="a requested fault"):
        asyncio.run(ask(fake, Fault("slow", "telemetry", seconds=600.0)))


def test_an_operation_that_fails():
    """It is accepted, fails in its turn, and is not carried out; other requests cannot fail so."""
    with FakeTinker(faults=[Fault("opfail", "forward_backward"), Fault("opfail", "create_session", skip=1)]) as fake:
        training = started(fake)
        fb, step = training.forward_backward(DATA, "cross_entropy"), training.optim_step(STEP)
        assert "by a requested fault" in str(outcome(fb))
        assert step.result().metrics["grad_norm:mean"] == 0.0
        assert (fake.count("forward_backward"), fake.count("optim_step")) == (0, 1)
        request = httpx.Request("POST", f"{fake.base_url}/api/v1/create_session", content=b"{}")
        with pytest.raises(rlkit.ConfigError, match="only a model's training calls"):
            asyncio.run(fake.respond(request))


@for_each(
    "options",
    [
        {"kind": "x"},
        {"kind": "200"},
        {"kind": 500},
        {"kind": "500", "when": "during"},
        {"kind": "500", "times": 0},
        {"kind": "500", "skip": -1},
        {"kind": "slow", "seconds": float("nan")},
        {"kind": "opfail", "when": "after"},
    ],
)
def test_faults_are_checked(options):
    with pytest.raises(rlkit.ConfigError, match="Fault"):
        Fault(**options)


def test_what_can_not_happen_is_refused():
    """A misspelt endpoint would make a test that cannot fail."""
    with FakeTinker() as fake:
        for fault in ("503", None, Fault("503", "optimstep")):
            with pytest.raises(rlkit.ConfigError, match="Fault"):
                fake.inject(fault)
    with pytest.raises(rlkit.ConfigError, match="latency"):
        FakeTinker(latency={"retrieve_future": 0.1})
