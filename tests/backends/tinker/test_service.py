"""What the Tinker backend has beside the protocol: connecting, saved states, scores, temperatures, calls in flight."""

from __future__ import annotations

import threading
import time
import traceback
from unittest import mock

import numpy as np
import pytest

import rlkit
from rlkit.backends.protocol import Capabilities, Routes, Storage
from rlkit.testing import FakeTinker, Fault
from tests.backends.tinker.conftest import STEP, connect
from tests.each import for_each
from tests.sockets import refusing_port

tinker = pytest.importorskip("tinker", reason="needs the extra tinker")


def drawn(policy, n=4, **params):
    params = rlkit.SamplingParams(**{"max_tokens": 8, "stop": (), **params})
    with policy.sampler().result() as sampler:
        return sampler.sample(policy.tokenizer.encode("hello"), params, n=n, seed=3).result()


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestConnecting:
    def test_nothing_listens(self, monkeypatch):
        """An address of this machine without a server is answered within seconds, by name; ports have defaults."""
        start = time.monotonic()
        with refusing_port() as port:
            for address in (f"http://127.0.0.1:{port}", f"http://localhost:{port}"):
                with pytest.raises(rlkit.BackendError, match=f"no answer from {address} .*is the server running"):
                    rlkit.connect("tinker", model="toy", base_url=address)
        assert time.monotonic() - start < 60  # the SDK alone would wait for minutes
        tried = mock.Mock(side_effect=ConnectionRefusedError)
        monkeypatch.setattr("socket.create_connection", tried)
        for address in ("http://127.0.0.1", "https://localhost"):
            with pytest.raises(rlkit.BackendError, match="is the server running"):
                rlkit.connect("tinker", model="toy", base_url=address)
        assert [call.args[0] for call in tried.call_args_list] == [("127.0.0.1", 80), ("localhost", 443)]

    def test_options_reach_the_policy(self, fake, policy, tiny):
        assert policy.max_length == 1024
        for protocol in (Capabilities, Routes, Storage):
            assert isinstance(policy, protocol)
        assert set(policy.capabilities()["models"]) == {"toy", "toy-large"}
        lora = rlkit.Lora(rank=4, seed=9, train_mlp=False)
        with connect(fake, lora=lora, max_length=50, tokenizer=tiny("llama")) as other:
            assert other.max_length == other.sampler().result().max_length == 50
            assert other.training_client.get_info().lora_rank == 4
            assert other.training_client.model_id in [x.model_id for x in fake.applied if x.operation == "create_model"]
            assert other.tokenizer.decode(other.tokenizer.encode("hello 12")) == "hello 12"
            assert other.tokenizer.eos_ids

    def test_an_injected_client_stays_open(self, fake):
        client = fake.service_client()
        with rlkit.connect("tinker", model="toy", client=client) as policy:
            assert policy.service_client is client
            drawn(policy)
        assert client.create_lora_training_client("toy").result().model_id

    @for_each(
        ("options", "error", "match"),
        [
            ({"model": None}, rlkit.ConfigError, "model.*toy-large"),
            ({"model": "toy-larg"}, rlkit.ConfigError, "did you mean 'toy-large'"),
            ({"model": 3}, rlkit.ConfigError, "model"),
            ({"lora": {"rank": 3}}, rlkit.ConfigError, "lora"),
            ({"lora": rlkit.Lora(alpha=16)}, rlkit.UnsupportedError, "alpha"),
            ({"lora": rlkit.Lora(target_modules=("q",))}, rlkit.UnsupportedError, "target_modules"),
            ({"deadline": 0}, rlkit.ConfigError, "deadline"),
            ({"off_temperature": "ignore"}, rlkit.ConfigError, "off_temperature"),
            ({"max_length": 1}, rlkit.ConfigError, "max_length"),
            ({"api_key": "sk-123456"}, rlkit.ConfigError, "starts with 'tml-'"),
            ({"api_key": 3}, rlkit.ConfigError, "api_key: expected a non-empty string"),
            ({"project": ""}, rlkit.ConfigError, "project: expected a non-empty string"),
            ({"tokenizer": 3}, rlkit.UnsupportedError, "tokenizer"),
            ({"tokenizer": "/nowhere/at/all"}, rlkit.ConfigError, "tokenizer"),
            ({"resume_from": "tinker://a"}, rlkit.CheckpointError, "tinker://<run>/weights"),
            ({"resume_from": "tinker://a/sampler_weights/b"}, rlkit.CheckpointError, "sampled from"),
            ({"resume_from": "tinker://a/weights/b"}, rlkit.CheckpointError, "tinker://a/weights/b"),
            ({"resume_from": 3}, rlkit.ConfigError, "resume_from"),
            ({"init_from": "elsewhere"}, rlkit.CheckpointError, "init_from: 'elsewhere' is not a saved state"),
            ({"init_from": "tinker://a/weights/b"}, rlkit.CheckpointError, r"init_from: tinker:.*\(404\)"),
            ({"api_key": "tml-wrong-key"}, rlkit.BackendError, r"API key \(401\).*TINKER_API_KEY"),
            ({"lora": rlkit.Lora(rank=1000)}, rlkit.ConfigError, "rank is 1000.*limit is 128"),
            ({"client": 3}, rlkit.ConfigError, "client|base_url"),
        ],
    )
    def test_bad_options(self, fake, options, error, match):
        with pytest.raises(error, match=match):
            connect(fake, **options)

    def test_a_tokenizer_that_is_not_found(self, fake, monkeypatch):
        """A server whose model no hub knows: the error names the option, within the deadline."""

        def missing(self):
            raise OSError("no such model on the hub, tml-canary-key-4f9a1c27")

        monkeypatch.setattr(tinker.TrainingClient, "get_tokenizer", missing)
        with pytest.raises(rlkit.ConfigError, match="set tokenizer=") as caught:
            connect(fake)
        assert "canary" not in str(caught.value)
        assert fake.requests[-1].endpoint == "finish_session"  # what was opened is closed
        with connect(fake, tokenizer=fake.tokenizer) as policy:
            assert policy.tokenizer is fake.tokenizer

    def test_a_backend_that_is_not_made_can_be_shown(self):
        """Reporters show locals, and the error that they report is the one that connecting failed with."""
        with pytest.raises(rlkit.RlkitError) as failed:
            rlkit.connect("tinker", model="toy", base_url="http://127.0.0.1:9", api_key="tml-x", deadline=0.5)
        text = "".join(traceback.TracebackException.from_exception(failed.value, capture_locals=True).format())
        assert "<TinkerBackend not connected>" in text
        assert "AttributeError" not in text


class TestSaving:
    def test_sampler_of_a_path(self, fake, policy):
        data = [s.datum(1.0) for s in drawn(policy)]
        policy.forward_backward(data, "ppo")
        policy.optim_step(STEP)
        path = policy.save("run", sampler=True).result()
        own = policy.sampler().result().logprobs(data[0].tokens).result()
        with rlkit.sampler("tinker", path=path, base_url=fake.base_url, api_key=fake.api_key) as sampler:
            assert sampler.version == 1
            assert np.array_equal(sampler.logprobs(data[0].tokens).result(), own)
        with rlkit.sampler("tinker", model="toy", base_url=fake.base_url, api_key=fake.api_key) as sampler:
            assert not np.array_equal(sampler.logprobs(data[0].tokens).result(), own)
            base = policy.base_sampler().result().logprobs(data[0].tokens).result()
            assert np.array_equal(sampler.logprobs(data[0].tokens).result(), base)
        with pytest.raises(rlkit.ConfigError, match=r"model= or path="):
            rlkit.sampler("tinker", base_url=fake.base_url, api_key=fake.api_key)

    def test_storage(self, fake, policy):
        """The stream of seeds is kept with a state: without it a resumed run would be another."""
        paths = [policy.save(name, sampler=name == "b").result() for name in ("a", "b")]
        kept = fake.rest_client().list_checkpoints(policy.training_client.model_id).result().checkpoints
        assert [each.user_metadata for each in kept] == [{"rlkit.seed": "0", "rlkit.requests": "0"}] * 3
        assert {each.tinker_path for each in kept} == {*paths, paths[1].replace("/weights/", "/sampler_weights/")}
        assert policy.saved().result()[0] == paths[0]
        policy.expire(paths[0], 3600).result()
        policy.delete(paths[1].replace("/weights/", "/sampler_weights/")).result()
        policy.delete(paths[1]).result()
        assert policy.saved().result() == paths[:1]
        with pytest.raises(rlkit.CheckpointError, match="404"):
            policy.delete(paths[1]).result()
        with pytest.raises(rlkit.ConfigError, match="an hour"):
            policy.expire(paths[0], 5)
        with pytest.raises(rlkit.CheckpointError, match="tinker://"):
            policy.delete("/tmp/x")  # noqa: S108  # any path that is not the service's
        for options in ({"model": "toy-large"}, {"lora": rlkit.Lora(rank=7)}):  # must agree with the path
            with pytest.raises(rlkit.ConfigError, match="saved state"):
                connect(fake, init_from=paths[0], **options)
        connect(fake, model=None, init_from=paths[0]).close()

    def test_snapshots_between_steps_share_one(self, fake, policy):
        samplers = [policy.sampler().result() for _ in range(3)]
        assert fake.count("save_weights_for_sampler") == 1
        samplers[0].close()
        samplers[1].logprobs([1, 2]).result()
        policy.forward_backward([s.datum(1.0) for s in drawn(policy)], "ppo")
        policy.optim_step(STEP)
        policy.sampler().result()
        assert fake.count("save_weights_for_sampler") == 2


def test_temperatures_at_which_the_service_cannot_train(fake, policy):
    """Such a datum is refused; "rescore" gives untempered logprobs, "keep" leaves them."""
    with pytest.raises(rlkit.UnsupportedError, match=r"data\[1\].*rescore"):
        policy.forward_backward([drawn(policy, temperature=x)[0].datum(1.0) for x in (1.0, 0.7)], "ppo")
    off = {}
    for option in ("rescore", "keep"):
        with connect(fake, off_temperature=option) as other:
            samples = drawn(other, temperature=0.7)
            trained = other.forward([s.datum(1.0) for s in samples]).result().selected
        assert {sample.temperature for sample in samples} == {0.7}
        off[option] = max(np.abs(s.logprobs - lp).max() for s, lp in zip(samples, trained, strict=True))
    assert off["rescore"] < 1e-5
    assert off["keep"] > 0.01


class TestInFlight:
    def test_calls_are_sent_before_results_are_read(self, fake, policy):
        """So that steps wait for the service together, and not one after the other."""
        data = [s.datum(1.0) for s in drawn(policy)]
        fake.inject(Fault("slow", "retrieve_future", seconds=0.5, times=None))
        futures, started = [], time.monotonic()
        for _ in range(5):
            futures += [policy.forward_backward(data, "ppo"), policy.optim_step(STEP)]
        wait_until(lambda: fake.count("optim_step") == 5)
        assert not futures[-1].done()
        trained = [x.operation for x in fake.applied if x.operation in ("forward_backward", "optim_step")]
        assert trained == ["forward_backward", "optim_step"] * 5
        policy.close()  # which finishes what was sent
        assert all(future.done() for future in futures)
        for future in futures:
            future.result()
        assert time.monotonic() - started < 4.0  # one by one they would take 5 seconds

    def test_a_cancelled_sample_is_cancelled_on_the_service(self, fake, policy):
        """And one whose answer is there is not; the next is as ever."""
        sampler = policy.sampler().result()

        def ask():
            return sampler.sample([1, 2], rlkit.SamplingParams(max_tokens=2), seed=1)

        asked = ask()
        expected = asked.result()
        assert not asked.cancel()
        so_far = [x.endpoint for x in fake.requests].count("retrieve_future")
        fake.inject(Fault("slow", "retrieve_future", seconds=0.5, times=None))
        future = ask()
        wait_until(lambda: [x.endpoint for x in fake.requests].count("retrieve_future") > so_far)
        assert future.cancel()
        with pytest.raises(rlkit.RequestCancelled):
            future.result()
        wait_until(lambda: "cancel_future" in [x.endpoint for x in fake.requests])
        fake.heal()
        assert ask().result()[0].tokens.tolist() == expected[0].tokens.tolist()

    def test_chunks_of_one_call_stay_in_order(self):
        with FakeTinker(seed=0, config={"fwdbwd_max_chunk_len": 3}) as fake, connect(fake) as policy:
            samples = drawn(policy, n=10)
            data = [s.datum(a) for a, s in enumerate(samples, start=-4)]
            output = policy.forward_backward(data, "importance_sampling").result()
            assert fake.count("forward_backward") == 4
        for sample, lp in zip(samples, output.selected, strict=True):
            np.testing.assert_allclose(sample.logprobs, lp, atol=1e-5)
        assert output.metrics["datums:sum"] == 10

    def test_nothing_is_left_behind(self, fake):
        connect(fake).close()  # the SDK's loop and its pool stay
        before = set(threading.enumerate())
        for _ in range(3):
            with connect(fake) as policy:
                policy.sampler().result().close()
        left = {t.name for t in set(threading.enumerate()) - before if t.is_alive()}
        assert not [name for name in left if name.startswith("rlkit-tinker")]
