"""What the Tinker backend has beside the protocol: connecting, saved states, scores, temperatures, calls in flight."""

from __future__ import annotations

import threading
import time
import traceback

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.backends.protocol import Capabilities, Routes, Storage
from rlkit.testing import FakeTinker, Fault
from tests.each import for_each
from tests.models.build import build
from tests.sockets import refusing_port

tinker = pytest.importorskip("tinker", reason="needs the extra tinker")
STEP = rlkit.Adam(learning_rate=0.05)


@pytest.fixture
def fake():
    with FakeTinker(seed=0, names=("toy", "toy-large")) as fake:
        yield fake


@pytest.fixture
def policy(fake):
    with connect(fake) as policy:
        yield policy


def connect(fake, **options):
    where = {"base_url": fake.base_url, "api_key": fake.api_key}
    return rlkit.connect("tinker", **{**where, "model": "toy", "seed": 0, "deadline": 30.0, **options})


def drawn(policy, n=4, **params):
    params = rlkit.SamplingParams(**{"max_tokens": 8, "stop": (), **params})
    with policy.sampler().result() as sampler:
        return sampler.sample(policy.tokenizer.encode("hello"), params, n=n, seed=3).result()


def reached(fake, endpoint, *, since):
    """Wait until a request to ``endpoint`` has reached the service behind the first ``since`` of all."""
    deadline = time.monotonic() + 30
    while all(request.endpoint != endpoint for request in fake.requests[since:]):
        assert time.monotonic() < deadline, f"no {endpoint} came"
        time.sleep(0.01)


class TestConnecting:
    def test_nothing_listens(self):
        """An address of this machine without a server is answered within seconds, by name."""
        with refusing_port() as port:
            for address in (f"http://127.0.0.1:{port}", f"http://localhost:{port}"):
                start = time.monotonic()
                with pytest.raises(rlkit.BackendError, match=f"no answer from {address} .*is the server running"):
                    rlkit.connect("tinker", model="toy", base_url=address)
                assert time.monotonic() - start < 30  # the SDK alone would wait for minutes
        with pytest.raises(rlkit.ConfigError, match="base_url"):
            rlkit.connect("tinker", model="toy", base_url="http://127.0.0.1:99999")

    def test_lora_reaches_the_service(self, fake):
        lora = rlkit.Lora(rank=4, seed=9, train_mlp=False)
        with connect(fake, lora=lora) as policy:
            info = policy.training_client.get_info()
        assert info.lora_rank == 4
        made = next(x for x in fake.applied if x.operation == "create_model")
        assert made.model_id == policy.training_client.model_id

    def test_no_deprecated_call(self, fake, recwarn):
        with connect(fake) as policy:
            policy.forward_backward([s.datum(1.0) for s in drawn(policy)], "ppo")
            policy.optim_step(STEP).result()
            path = policy.save("x", sampler=True).result()
            policy.saved().result()
        connect(fake, resume_from=path).close()
        assert not [w for w in recwarn if issubclass(w.category, (FutureWarning, DeprecationWarning))]

    def test_an_injected_client_stays_open(self, fake):
        client = fake.service_client()
        with rlkit.connect("tinker", model="toy", client=client) as policy:
            assert policy.service_client is client
            drawn(policy)
        assert client.create_lora_training_client("toy").result().model_id

    def test_tokenizer_of_a_directory(self, fake, tmp_path):
        with connect(fake, tokenizer=build("llama", tmp_path)) as policy:
            ids = policy.tokenizer.encode("hello 12")
            assert policy.tokenizer.decode(ids) == "hello 12"
            assert policy.tokenizer.eos_ids

    def test_length_is_the_service_s(self, fake):
        with connect(fake) as policy:
            assert policy.max_length == 1024
        with connect(fake, max_length=50) as policy:
            assert policy.max_length == 50
            assert policy.sampler().result().max_length == 50

    def test_capabilities(self, policy):
        assert isinstance(policy, Capabilities)
        assert isinstance(policy, Routes)
        assert set(policy.capabilities()["models"]) == {"toy", "toy-large"}

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
            ({"deadline": "soon"}, rlkit.ConfigError, "deadline"),
            ({"off_temperature": "ignore"}, rlkit.ConfigError, "off_temperature"),
            ({"max_length": 1}, rlkit.ConfigError, "max_length"),
            ({"api_key": "sk-123456"}, rlkit.ConfigError, "starts with 'tml-'"),
            ({"api_key": "TML-123456"}, rlkit.ConfigError, "starts with 'tml-'"),
            ({"api_key": 3}, rlkit.ConfigError, "api_key: expected a non-empty string"),
            ({"project": ""}, rlkit.ConfigError, "project: expected a non-empty string"),
            ({"base_url": "ftp://x"}, rlkit.ConfigError, "base_url"),
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
            ({"rank": 3}, rlkit.ConfigError, "rank"),
        ],
    )
    def test_bad_options(self, fake, options, error, match):
        with pytest.raises(error, match=match):
            connect(fake, **options)


class TestSaving:
    def test_version_and_seeds_come_back(self, fake, policy):
        data = [s.datum(1.0) for s in drawn(policy)]
        for _ in range(3):
            policy.forward_backward(data, "ppo")
            policy.optim_step(STEP)
        with policy.sampler().result() as sampler:
            sampler.sample([1, 2], rlkit.SamplingParams(max_tokens=2)).result()
        path = policy.save("run").result()
        assert path.startswith("tinker://")
        with connect(fake, seed=None, resume_from=path) as resumed:
            assert resumed.version == 3
            follow = [
                p.sampler().result().sample([1, 2], rlkit.SamplingParams(max_tokens=9)) for p in (policy, resumed)
            ]
            a, b = (f.result()[0].tokens.tolist() for f in follow)
            assert a == b

    def test_what_is_said_beside_a_path_must_agree(self, fake, policy):
        path = policy.save("run").result()
        for options in ({"model": "toy-large"}, {"lora": rlkit.Lora(rank=7)}):
            with pytest.raises(rlkit.ConfigError, match="saved state"):
                connect(fake, init_from=path, **options)
        connect(fake, model=None, init_from=path).close()

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

    def test_storage(self, policy):
        assert isinstance(policy, Storage)
        paths = [policy.save(name).result() for name in ("a", "b")]
        assert policy.saved().result() == paths
        policy.expire(paths[0], 3600).result()
        policy.delete(paths[1]).result()
        assert policy.saved().result() == paths[:1]
        with pytest.raises(rlkit.CheckpointError, match="404"):
            policy.delete(paths[1]).result()
        with pytest.raises(rlkit.ConfigError, match="an hour"):
            policy.expire(paths[0], 5)
        with pytest.raises(rlkit.CheckpointError, match="tinker://"):
            policy.delete("/tmp/x")  # noqa: S108  # any path that is not the service's

    def test_what_is_kept_with_a_state(self, fake, policy):
        """The stream of seeds, without which a resumed run would be another."""
        drawn(policy)
        path = policy.save("a", sampler=True).result()
        kept = fake.rest_client().list_checkpoints(policy.training_client.model_id).result().checkpoints
        assert path in {each.tinker_path for each in kept}
        assert [each.user_metadata for each in kept] == [{"rlkit.seed": "0", "rlkit.requests": "0"}] * 2

    def test_snapshots_between_steps_share_one(self, fake, policy):
        samplers = [policy.sampler().result() for _ in range(3)]
        assert fake.count("save_weights_for_sampler") == 1
        samplers[0].close()
        samplers[1].logprobs([1, 2]).result()
        policy.forward_backward([s.datum(1.0) for s in drawn(policy)], "ppo")
        policy.optim_step(STEP)
        policy.sampler().result()
        assert fake.count("save_weights_for_sampler") == 2


def test_a_backend_that_is_not_made_yet_can_be_shown():
    """Reporters show locals, and the error that they report is the one that connecting failed with."""
    with pytest.raises(rlkit.RlkitError) as failed:
        rlkit.connect("tinker", model="toy", base_url="http://127.0.0.1:9", api_key="tml-x", deadline=0.5)
    shown = traceback.TracebackException.from_exception(failed.value, capture_locals=True)
    text = "".join(shown.format())
    assert "<TinkerBackend not connected>" in text
    assert "AttributeError" not in text


@pytest.mark.parametrize("name", ["toy", "local", "tinker"])
def test_what_connecting_left_unmade_can_be_shown(name):
    """Whatever raised, and wherever."""
    pytest.importorskip("peft")
    made = rlkit.backends.registry.resolve(name)
    assert "not connected" in repr(made.__new__(made))


class TestTemperatures:
    def test_rescore_gives_untempered_logprobs(self, fake):
        with connect(fake, off_temperature="rescore") as policy:
            samples = drawn(policy, temperature=0.7)
            trained = policy.forward([s.datum(1.0) for s in samples]).result().selected
        for sample, lp in zip(samples, trained, strict=True):
            np.testing.assert_allclose(sample.logprobs, lp, atol=1e-5)
            assert sample.temperature == 0.7

    def test_keep_leaves_them(self, fake):
        with connect(fake, off_temperature="keep") as policy:
            samples = drawn(policy, temperature=0.7)
            trained = policy.forward([s.datum(1.0) for s in samples]).result().selected
        assert max(np.abs(s.logprobs - lp).max() for s, lp in zip(samples, trained, strict=True)) > 0.01

    def test_raise_is_the_default_and_names_the_datum(self, policy):
        cold = [attrs.evolve(s.datum(1.0), temperature=0.7) for s in drawn(policy)]
        with pytest.raises(rlkit.UnsupportedError, match=r"data\[1\].*rescore"):
            policy.forward_backward([drawn(policy)[0].datum(1.0), cold[1]], "ppo")


class TestInFlight:
    def test_a_step_costs_one_round_trip(self):
        """With 100 ms until a result comes, steps that are sent ahead wait once each, and not twice."""

        def waits(policy, data, *, ahead):
            started, before = time.monotonic(), None
            for _ in range(10):
                fb = policy.forward_backward(data, "ppo")
                if not ahead:
                    fb.result()
                op = policy.optim_step(STEP)
                if not ahead:
                    op.result()
                elif before is not None:
                    before.result()  # of the step before: this step's calls are under way already
                before = op
            before.result()
            return (time.monotonic() - started) / 0.1

        late = Fault("slow", "retrieve_future", seconds=0.1, times=None)
        with FakeTinker(seed=0, faults=[late]) as fake, connect(fake) as policy:
            data = [s.datum(1.0) for s in drawn(policy)]
            policy.forward_backward(data, "ppo").result()
            policy.optim_step(STEP).result()
            assert waits(policy, data, ahead=False) >= 20
            # Best of a few, since the machine may be busy: with two waits a step it would never be below 20.
            assert min(waits(policy, data, ahead=True) for _ in range(4)) < 16

    def test_calls_are_sent_before_results_are_read(self, fake, policy):
        data = [s.datum(1.0) for s in drawn(policy)]
        fake.inject(Fault("slow", "retrieve_future", seconds=0.3, times=None))
        futures = []
        for _ in range(3):
            futures += [policy.forward_backward(data, "ppo"), policy.optim_step(STEP)]
        started = time.monotonic()
        while fake.count("optim_step") < 3 and time.monotonic() - started < 10:
            time.sleep(0.01)
        assert not futures[-1].done()
        trained = [x.operation for x in fake.applied if x.operation in ("forward_backward", "optim_step")]
        assert trained == ["forward_backward", "optim_step"] * 3
        policy.close()  # which finishes what was sent
        assert all(future.done() for future in futures)
        for future in futures:
            future.result()

    def test_a_cancelled_sample_is_cancelled_on_the_service(self, fake, policy):
        """And one whose answer is there is not; the next is as ever."""
        sampler = policy.sampler().result()
        asked = sampler.sample([1, 2], rlkit.SamplingParams(max_tokens=2), seed=1)
        expected = asked.result()
        assert not asked.cancel()
        so_far = len(fake.requests)
        fake.inject(Fault("slow", "retrieve_future", seconds=0.5, times=None))
        future = sampler.sample([1, 2], rlkit.SamplingParams(max_tokens=2), seed=1)
        reached(fake, "retrieve_future", since=so_far)
        assert future.cancel()
        with pytest.raises(rlkit.RequestCancelled):
            future.result()
        reached(fake, "cancel_future", since=so_far)
        fake.heal()
        again = sampler.sample([1, 2], rlkit.SamplingParams(max_tokens=2), seed=1).result()
        assert again[0].tokens.tolist() == expected[0].tokens.tolist()

    def test_chunks_of_one_call_stay_in_order(self):
        with FakeTinker(seed=0, config={"fwdbwd_max_chunk_len": 3}) as fake, connect(fake) as policy:
            samples = drawn(policy, n=10)
            data = [s.datum(a) for a, s in enumerate(samples, start=-4)]
            output = policy.forward_backward(data, "importance_sampling").result()
            assert fake.count("forward_backward") == 4
        for sample, lp in zip(samples, output.selected, strict=True):
            np.testing.assert_allclose(sample.logprobs, lp, atol=1e-5)
        assert output.metrics["datums:sum"] == 10

    def test_many_samples_at_once(self, policy):
        params = rlkit.SamplingParams(max_tokens=4, stop=())
        with policy.sampler().result() as sampler:
            futures = [sampler.sample([1, 2, 3], params, n=2, seed=i) for i in range(100)]
            found = [f.result() for f in futures]
        assert len({tuple(s.tokens.tolist()) for pair in found for s in pair}) > 150

    def test_nothing_is_left_behind(self, fake):
        """No thread but the SDK's loop and its pool; what is closed refuses calls, and may be closed again."""
        connect(fake).close()
        before = set(threading.enumerate())
        for _ in range(3):
            with connect(fake) as policy:
                sampler = policy.sampler().result()
            policy.close()
            sampler.close()
            for call in (lambda: policy.save("x"), lambda: sampler.logprobs([1])):  # noqa: B023  # called here
                with pytest.raises(rlkit.BackendError, match="closed"):
                    call()
        left = {t.name for t in set(threading.enumerate()) - before if t.is_alive()}
        assert not [name for name in left if name.startswith("rlkit-tinker")]

    def test_parameters_of_another_optimizer(self, fake, policy):
        policy.forward_backward([s.datum(1.0) for s in drawn(policy)], "ppo")
        with pytest.raises(rlkit.ConfigError, match="Adam"):
            policy.optim_step(tinker.AdamParams(learning_rate=1e-3))
        policy.optim_step(STEP).result()


class TestFirstContact:
    def test_a_tokenizer_that_is_not_found(self, fake, monkeypatch):
        """A server whose model no hub knows: the error names the option, within the deadline."""

        def missing(self):
            raise OSError("no such model on the hub, tml-canary-key-4f9a1c27")

        monkeypatch.setattr(tinker.TrainingClient, "get_tokenizer", missing)
        with pytest.raises(rlkit.ConfigError, match="set tokenizer=") as caught:
            connect(fake)
        assert "canary" not in str(caught.value)
        with connect(fake, tokenizer=fake.tokenizer) as policy:
            assert policy.tokenizer is fake.tokenizer

    def test_more_tokens_than_there_are(self, policy):
        with pytest.raises(rlkit.ConfigError, match="k"):
            policy.sampler().result().top_logprobs([1, 2], 10_000)
