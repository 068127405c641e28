"""FakeTinker: the SDK's own client, faults that do what they say, counts that tell what was really done."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib
import json
import pkgutil
import threading
import time

import numpy as np
import pytest

import rlkit
from tests.server.sdk import datum, prompt, tinker, types

httpx = pytest.importorskip("httpx")

from rlkit.testing import FakeTinker, Fault, _faketinker  # noqa: E402

DATA = [datum(list(b"hello world"), weights=1.0)]
STEP = types.AdamParams(learning_rate=0.05)


def started(fake):
    return fake.service_client().create_lora_training_client("toy", rank=8).result()


def outcome(future, seconds=20.0):
    """The result, or the exception."""
    try:
        return future.result(timeout=seconds)
    except Exception as error:
        return error


def test_the_seam_is_replaced_and_put_back(monkeypatch):
    """Only while a fake is open, for its clients, if they are not given an HTTP client; a moved one is an error."""

    def names():
        return [getattr(pkgutil.resolve_name(owner), name) for owner, name in _faketinker._REPLACED]

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
        one.inject(Fault("500", times=None))  # which ends with the fake
    assert before == names()
    assert one.requests[-1].endpoint == two.requests[-1].endpoint == "finish_session"
    moved = {**_faketinker._REPLACED, ("tinker.lib.internal_client_holder", "Moved"): print}
    monkeypatch.setattr(_faketinker, "_REPLACED", moved)
    with pytest.raises(rlkit.UnsupportedError, match=r"FakeTinker needs tinker .*Moved"), FakeTinker():
        pass
    assert not _faketinker._originals


def test_mistakes_are_refused():
    """A fault that cannot happen would make a test that cannot fail."""
    fake = FakeTinker()
    with pytest.raises(rlkit.ConfigError, match="with FakeTinker"):
        fake.service_client()
    with fake, pytest.raises(rlkit.ConfigError, match="open already"):
        fake.open()
    fake.close()
    for fault in ("503", None, Fault("503", "optimstep")):
        with pytest.raises(rlkit.ConfigError, match="Fault"):
            fake.inject(fault)
    for latency in ({"retrieve_future": 0.1}, -0.1):
        with pytest.raises(rlkit.ConfigError, match="latency"):
            FakeTinker(latency=latency)
    status = {"kind": "500"}
    for wrong in (
        {"kind": "x"},
        {"kind": "200"},
        {"kind": 500},
        {**status, "when": "during"},
        {**status, "times": 0},
        {**status, "skip": -1},
        {"kind": "slow", "seconds": float("nan")},
        {"kind": "opfail", "when": "after"},
    ):
        with pytest.raises(rlkit.ConfigError, match="Fault"):
            Fault(**wrong)


def test_nothing_is_left():
    """No threads but the SDK's own, no open sessions, no telemetry was sent; a dead server does not hold it up."""
    with FakeTinker() as fake:
        started(fake).forward_backward_custom(DATA, lambda data, lps: (sum(lp.sum() for lp in lps), {})).result()
    before, start = {t.name for t in threading.enumerate()}, time.monotonic()
    for _ in range(3):
        with FakeTinker() as fake:
            training = started(fake)
            training.forward_backward(DATA, "cross_entropy").result()
            sampler = training.save_weights_and_get_sampling_client().result()
            sampler.sample(prompt([65]), 4, types.SamplingParams(max_tokens=3)).result()
            fake.inject(Fault("500", times=None))
            fake.latency = 240.0
    gc.collect()
    assert time.monotonic() - start < 120
    assert {t.name for t in threading.enumerate()} <= before  # threads of earlier tests may end meanwhile
    assert fake.requests[-1].endpoint == "finish_session"
    assert not any(x.endpoint == "telemetry" for x in fake.requests)
    assert all(s.finished for s in fake.service.sessions.values())


def test_tokenizer():
    """Without a hub: both clients give the model's own, in the form that users of the SDK know, also of two fakes."""
    with FakeTinker(), FakeTinker() as fake:
        training = started(fake)
        for client in (training, training.save_weights_and_get_sampling_client().result()):
            tokenizer = client.get_tokenizer()
            assert tokenizer.inner is fake.tokenizer
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
        sampler = await training.save_weights_and_get_sampling_client()
        samples = await asyncio.gather(*(sampler.compute_logprobs(prompt([65, k])) for k in range(10)))
        return [await call for call in calls], samples

    with FakeTinker() as fake:
        results, samples = asyncio.run(run(fake))
    assert results[0].metrics["loss:sum"] > 0
    assert len(samples) == 10


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("limit", [{"fwdbwd_max_chunk_len": 4}, {"fwdbwd_max_chunk_bytes_count": 250}])
def test_chunks(parallel, limit):
    """A call that is cut into requests, the first of which comes last, is put together in order and summed."""
    data = [datum([k, k + 1, k + 2] * (1 + k % 3), weights=1.0) for k in range(10)]
    found = []
    with FakeTinker() as whole, FakeTinker(config={"parallel_fwdbwd_chunks": parallel, **limit}) as cut:
        for fake in (whole, cut):
            training = started(fake)
            result = training.forward_backward(data, "cross_entropy").result()
            training.optim_step(STEP).result()
            found.append((result, fake.service.runs[training.model_id].model.backend._weights.value))
        assert whole.count("forward_backward") == 1
        assert cut.count("forward_backward") >= 3
        seq_ids = [x.seq_id for x in cut.applied if x.operation == "forward_backward"]
        assert seq_ids == sorted(seq_ids)
    (one, weights), (other, same) = found
    for a, b in zip(one.loss_fn_outputs, other.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(a["logprobs"].to_numpy(), b["logprobs"].to_numpy())
    assert one.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], rel=1e-6)
    np.testing.assert_allclose(weights, same, atol=1e-9)


def test_two_servers_in_one_process():
    """A fake on the SDK's own loop, and a server on another one, of one program: their results are apart."""
    with FakeTinker() as fake, rlkit.serve("toy") as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
        trainings = [started(fake), client.create_lora_training_client("toy").result()]
        calls = [t.forward_backward(DATA, "cross_entropy") for _ in range(5) for t in trainings]
        assert len({call.result(timeout=30).metrics["loss:sum"] for call in calls}) == 1
        client.close("success").result()


RETRIED = ("429", "500", "503", "lost", "slow")
STATUS = {"401": tinker.AuthenticationError, "404": tinker.NotFoundError, "410": tinker.APIStatusError}
OF_A_STEP = {**STATUS, "bad_json": json.JSONDecodeError}
OF_A_RESULT = {"401": ValueError, "404": ValueError, "410": Exception, "bad_json": json.JSONDecodeError}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("endpoint", "passed_on"), [("optim_step", OF_A_STEP), ("retrieve_future", OF_A_RESULT)])
def test_faults_of_a_step(endpoint, passed_on, when):
    """The SDK repeats what may pass, and the step is applied once; the rest it passes on, applied or not.

    Whatever happens to the answer of retrieve_future, the step is applied, once.
    """

    def work(kind):
        operation = "optim_step" if endpoint == "retrieve_future" else None
        fault = Fault(kind, endpoint, when=when, operation=operation, seconds=0.2)
        with FakeTinker(faults=[fault]) as fake:
            training = started(fake)
            result = outcome(training.optim_step(STEP))
            assert isinstance(result, passed_on.get(kind, types.OptimStepResponse)), (kind, result)
            fake.service.runs[training.model_id].worker.drain()
            expected = kind in RETRIED or when == "after" or endpoint == "retrieve_future"
            assert (fake.count("optim_step"), fake.repeated_operations()) == (expected, []), kind
            assert [x.fault for x in fake.requests].count(fault) == 1

    kinds = [*RETRIED, *passed_on]
    with concurrent.futures.ThreadPoolExecutor(len(kinds)) as pool:  # at once, since each waits for the SDK's pauses
        assert len(list(pool.map(work, kinds))) == 9


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
        started(fake).optim_step(STEP).result()
        assert fake.count("optim_step") == 2
        assert [x.operation for x in fake.repeated_operations()] == ["optim_step"]


def test_skipping_and_repeating():
    """The third and fourth of all results are late; everything else is as it was. Latency is of each request."""
    fault, start = Fault("503", "get_info", skip=2, times=2), time.monotonic()
    with FakeTinker(faults=[fault], latency=0.05) as fake:
        service = fake.service_client()
        for _ in range(3):
            service.create_lora_training_client("toy").result()
        assert [x.fault for x in fake.requests if x.endpoint == "get_info"] == [None, None, fault, fault, None]
        assert time.monotonic() - start >= 0.05 * len(fake.requests) >= 0.5


def test_a_dead_server():
    """Fails until it is healed; with an expired session for good."""
    with FakeTinker() as fake:
        training = started(fake)
        fake.inject(Fault("lost", times=None))
        first, step, began = len(fake.requests), training.optim_step(STEP), time.monotonic()
        while len(fake.requests) < first + 2:
            with pytest.raises(TimeoutError):
                step.result(timeout=0.1)
        seen = fake.requests[first:]
        assert len(seen) <= 2 + (time.monotonic() - began) / 0.3
        assert all(x.fault is not None and x.endpoint == "optim_step" for x in seen)
        assert fake.count("optim_step") == 0
        fake.heal()
        assert isinstance(outcome(step), types.OptimStepResponse)
        fake.expire()
        error = outcome(training.optim_step(STEP))
        assert (type(error), error.status_code) == (tinker.APIStatusError, 410)
        assert fake.count("optim_step") == 1


def test_a_paused_queue(caplog):
    """The SDK says so and goes on when it is over."""
    fault = Fault("paused", "retrieve_future", operation="sample", times=3, seconds=0.05)
    with FakeTinker(faults=[fault]) as fake:
        sampler = started(fake).save_weights_and_get_sampling_client().result()
        assert sampler.compute_logprobs(prompt([1, 2])).result()[0] is None
        assert "a requested fault" in caplog.text
        assert [x.fault for x in fake.requests if x.operation == "sample"] == [fault, fault, fault, None]


def test_what_arrives_in_place_of_an_answer():
    """An answer beyond the client's patience is a timeout, without the minutes that the client would wait."""

    def ask(fake, path="telemetry"):
        more = {"headers": {"x-api-key": fake.api_key}, "extensions": {"timeout": {"read": 0.05}}}
        return asyncio.run(fake.respond(httpx.Request("POST", f"{fake.base_url}/api/v1/{path}", **more)))

    with FakeTinker() as fake:
        for kind, error in (("slow", httpx.ReadTimeout), ("lost", httpx.ReadError)):
            fake.inject(Fault(kind, "telemetry", seconds=600.0))
            with pytest.raises(error, match="a requested fault") as caught:
                ask(fake)
            assert caught.value.request.url.host in fake.base_url
        for kind, status, said in (("bad_json", 200, '{"request_id": '), ("paused", 408, "paused_capacity")):
            fake.inject(Fault(kind, "telemetry", seconds=0.0))
            answer = ask(fake)
            assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
            assert said in answer.text
        assert ask(fake, "nothing").status_code == 404


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
