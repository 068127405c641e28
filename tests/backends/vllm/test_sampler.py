"""The client and its sampler against the gateway's /v1/completions, which has vLLM's additions."""

from __future__ import annotations

import contextlib
import gc
import itertools
import socket
import threading

import numpy as np
import pytest

import rlkit
from rlkit.backends.protocol import Sampler, TopK
from rlkit.backends.vllm import open_sampler
from rlkit.backends.vllm._client import (
    ModelMissing,
    ServerLost,
    VllmClient,
    _refusal,
    read_samples,
    read_scores,
    sample_request,
    score_request,
    server_seed,
    submit,
)
from rlkit.futures import Future

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from rlkit.gateway import Gateway, Limits

PARAMS = rlkit.SamplingParams(max_tokens=5, stop=())


@pytest.fixture
def policy():
    with rlkit.connect("toy", seed=0) as policy:
        yield policy


@pytest.fixture
def inner(policy):
    return policy.sampler().result()


@pytest.fixture
def gateway(inner):
    with Gateway(inner, open=True, key="secret") as gateway:
        yield gateway


@pytest.fixture
def sampler(gateway, inner):
    with open_sampler(gateway.url, tokenizer=inner.tokenizer, key="secret", seed=1, version=7) as sampler:
        yield sampler


def test_it_is_a_sampler(sampler, inner):
    """Of the protocol, with the model's context and the version that it was told."""
    assert isinstance(sampler, Sampler)
    assert isinstance(sampler, TopK)
    assert sampler.max_length == inner.max_length
    assert sampler.version == 7


def test_samples_carry_what_was_drawn(sampler, inner):
    """Tokens and the logprobs of the distribution that they were drawn from; version and options recorded."""
    params = rlkit.SamplingParams(max_tokens=6, temperature=0.7, stop=())
    prompt = inner.tokenizer.encode("hello")
    samples = sampler.sample(prompt, params, n=3, seed=5).result()
    assert [s.tokens.size for s in samples] == [6, 6, 6]
    for sample in samples:
        scored = inner.logprobs(np.append(prompt, sample.tokens), temperature=0.7).result()[prompt.size :]
        assert np.abs(scored - sample.logprobs).max() < 1e-5
        assert (sample.version, sample.temperature, sample.stop_reason) == (7, 0.7, "length")
    assert len({tuple(s.tokens) for s in samples}) == 3


def test_seeds_repeat(sampler):
    """One seed, the same tokens; without seeds a stream of them."""
    draw = lambda **more: [s.tokens.tolist() for s in sampler.sample([1, 2], PARAMS, n=2, **more).result()]  # noqa: E731
    assert draw(seed=3) == draw(seed=3)
    assert draw(seed=3) != draw(seed=4)
    assert draw() != draw()


def test_seeds_of_neighbours_share_nothing():
    """vLLM adds the sample's number to the seed: those of two requests must not meet."""
    starts = sorted(server_seed(seed) for seed in range(200))
    assert min(b - a for a, b in itertools.pairwise(starts)) > 2**32
    assert starts[-1] < 2**62


def test_logprobs_and_alternatives(sampler, inner):
    """Those of the policy itself, in its own order."""
    text = inner.tokenizer.encode("hello there")
    assert np.abs(sampler.logprobs(text).result() - inner.logprobs(text).result()).max() < 1e-5
    ids, best = sampler.top_logprobs(text, 3).result()
    wanted_ids, wanted = inner.top_logprobs(text, 3).result()
    assert np.abs(best - wanted).max() < 1e-5
    assert ids.tolist() == wanted_ids.tolist()
    three = sampler.prompt_logprobs(text, 2).result()
    assert [x.shape for x in three] == [(text.size,), (text.size, 2), (text.size, 2)]
    with pytest.raises(rlkit.UnsupportedError, match="temperature 1 only"):
        sampler.logprobs(text, temperature=0.5)


def test_stops(sampler, inner):
    """An id, a text, and nothing at all; the stop is part of the sample."""
    prompt = inner.tokenizer.encode("ab")
    full = sampler.sample(prompt, rlkit.SamplingParams(max_tokens=12, stop=()), seed=9).result()[0]
    token = int(full.tokens[3])
    stopped = sampler.sample(prompt, rlkit.SamplingParams(max_tokens=12, stop=(token,)), seed=9).result()[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens[-1] in {token, *inner.tokenizer.eos_ids}


def test_what_is_asked_for(inner):
    """All of the params by vLLM's names; cuts and stops only where there are some."""
    plain = {"prompt": [1, 2], "n": 3, "seed": server_seed(7), "max_tokens": 5, "temperature": 1.0, "logprobs": 0}
    plain |= {"return_token_ids": True, "skip_special_tokens": False}
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    ask = lambda **how: sample_request(np.array([1, 2]), rlkit.SamplingParams(**how), 3, 7, 5, inner.tokenizer)  # noqa: E731
    none = dict(zip(penalties, (1.0, 0.0, 0.0), strict=True))
    assert ask(stop=()) == {**plain, **none, "ignore_eos": True}
    assert [ask(temperature=bound)["temperature"] for bound in (0.0, 0.01, 2.0)] == [0.0, 0.01, 2.0]
    eos = [*inner.tokenizer.eos_ids]
    assert ask(stop=(9,)) == {**plain, **none, "ignore_eos": False, "stop_token_ids": [9, *eos], "stop": []}
    ends = {"ignore_eos": False, "stop_token_ids": eos, "stop": ["x"]}
    cuts = {"top_p": 0.9, "top_k": 20, "min_p": 0.1}
    assert ask(stop=("x",), **cuts, **penalties) == {**plain, **penalties, **cuts, **ends}
    scored = {"prompt": [1, 2], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 4}
    assert score_request(np.array([1, 2]), 4) == scored


def test_refused_before_it_is_sent(sampler, inner):
    """What vLLM would do otherwise than it was told, bad arguments, and all after close()."""
    with pytest.raises(rlkit.UnsupportedError, match=r"temperature=0\.005"):
        sampler.sample([1], rlkit.SamplingParams(temperature=0.005))
    with pytest.raises(rlkit.UnsupportedError, match="at most 2"):
        sampler.sample([1], rlkit.SamplingParams(temperature=2.5))
    with pytest.raises(rlkit.DataError, match="the server samples one token after scoring"):
        sampler.logprobs(np.ones(inner.max_length, np.int64))
    sampler.close()
    with pytest.raises(rlkit.BackendError, match="closed"):
        sampler.sample([1], PARAMS)


class Reversed:
    """Another tokenizer."""

    def __init__(self, inner):
        self.inner = inner
        self.eos_ids, self.vocab_size, self.chat_template = inner.eos_ids, inner.vocab_size, None

    def encode(self, text, *, special=False):
        return self.inner.encode(text)[::-1]

    def decode(self, tokens, skip_special=True):
        return self.inner.decode(tokens)

    def apply_chat_template(self, messages, **variables):
        raise NotImplementedError


def test_errors_of_the_server(gateway, inner):
    """A wrong key, a model that is not there, nobody at that address."""
    with pytest.raises(rlkit.BackendError, match="401"):
        open_sampler(gateway.url, tokenizer=inner.tokenizer, key="wrong")
    with pytest.raises(rlkit.ConfigError, match="has no model 'other'; it has policy"):
        open_sampler(gateway.url, tokenizer=inner.tokenizer, key="secret", model="other")
    with pytest.raises(rlkit.BackendError, match="cannot be reached"):
        open_sampler("http://127.0.0.1:9", tokenizer=inner.tokenizer)
    with pytest.raises(rlkit.ConfigError, match="names 'policy' as its model's folder, which this machine"):
        open_sampler(gateway.url, key="secret")
    with pytest.raises(rlkit.ConfigError, match="another tokenizer.*set tokenizer="):
        open_sampler(gateway.url, key="secret", tokenizer=Reversed(inner.tokenizer))


def test_addresses():
    """What is no host's name is an error as of one that is not there; a password is not shown."""
    for url, said in (("http://xn--zzzzzzz99", "IDNAError"), ("http://user:hidden@127.0.0.1:1", "ConnectError")):
        client = VllmClient(url)
        with pytest.raises(ServerLost, match=f"cannot be reached: {said}") as caught:
            submit(client.check_health()).result()
        assert "hidden" not in str(caught.value)
        submit(client.close()).result()


def test_one_that_accepts_no_connection():
    """It is told from one that is silent."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        port = full.getsockname()[1]
        for _ in range(3):  # nobody accepts them, and no more fit in the queue
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        client = VllmClient(f"http://127.0.0.1:{port}")
        with pytest.raises(
            rlkit.BackendError, match="/health: the server cannot be reached: no connection within 0.8 s"
        ):
            submit(client.check_health(1.0)).result()
        submit(client.close()).result()


def test_a_url_is_a_policy(gateway, inner):
    """For evaluations, for `rlkit.sampler`, and for another gateway over it."""
    from rlkit.envs import function
    from rlkit.evaluation import evaluate_sync

    options = {"tokenizer": inner.tokenizer, "key": "secret"}
    with rlkit.sampler(gateway.url, **options) as first, Gateway(first, open=True, key="other") as outer:
        rows = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "2 + 2 =", "answer": "4"}]
        tasks = function(rows, lambda text, answer: float(answer in text), name="sums")
        scores = evaluate_sync(first, tasks, params=PARAMS, progress=False).scores
        assert scores["sums"].episodes == 2
        with rlkit.sampler(outer.url, tokenizer=inner.tokenizer, key="other") as second:
            text = inner.tokenizer.encode("hello there")
            assert np.abs(second.logprobs(text).result() - inner.logprobs(text).result()).max() < 1e-5
            drawn = [each.sample(text, PARAMS, seed=3).result()[0].tokens.tolist() for each in (first, second)]
            assert all(len(tokens) == 5 for tokens in drawn)
    with pytest.raises(rlkit.ConfigError, match="together with a URL"):
        rlkit.sampler(gateway.url, path="x")


def test_a_session_records_what_is_asked_for_alone(gateway, inner):
    """Not what is asked to look at the server, or to score; then so many samples as a gateway's user may want."""
    with gateway.session(limits=Limits(turns=200)) as session:
        with rlkit.sampler(session.root_url, tokenizer=inner.tokenizer) as sampler:
            sampler.logprobs([65, 66]).result()
            sampler.top_logprobs([65, 66], 2).result()
            assert session.turns == []
            assert len(sampler.sample([65], rlkit.SamplingParams(max_tokens=1), n=200).result()) == 200
        assert len(session.turns) == 200
    session = gateway.session(params=rlkit.SamplingParams(temperature=0.5))  # it does not draw as it is asked to
    with session, pytest.raises(rlkit.BackendError, match="top_k=1"):
        rlkit.sampler(session.root_url, tokenizer=inner.tokenizer)


class Waits:
    """A sampler that answers what is asked at opening alone, and tells when a request was cancelled or forgotten."""

    def __init__(self, inner):
        self.tokenizer, self.max_length, self.version = inner.tokenizer, inner.max_length, 0
        self.asked, self.dropped, self.inner = threading.Event(), threading.Event(), inner

    def sample(self, prompt, params, *, n=1, seed=None):
        import concurrent.futures

        if params.top_k == 1:
            return self.inner.sample(prompt, params, n=n, seed=seed)
        self.asked.set()
        return Future.wrap(concurrent.futures.Future(), on_drop=self.dropped.set, on_cancel=self.dropped.set)

    def logprobs(self, tokens, *, temperature=1.0):
        raise NotImplementedError

    def close(self):
        pass


@pytest.mark.parametrize("how", ["cancel", "forget"])
def test_what_nobody_waits_for_is_ended_on_the_server(inner, how):
    """Cancelled or forgotten here, cancelled there."""
    waits = Waits(inner)
    with (
        Gateway(waits, open=True, key="k") as gateway,
        open_sampler(gateway.url, tokenizer=inner.tokenizer, key="k") as sampler,
    ):
        future = sampler.sample([1], PARAMS)
        assert waits.asked.wait(30)
        if how == "cancel":
            assert future.cancel()
            with pytest.raises(rlkit.BackendError, match="cancelled"):
                future.result()
        else:
            del future
            gc.collect()
        assert waits.dropped.wait(30)


def test_a_server_that_hangs_ends_in_a_typed_error(inner):
    """After the deadline; the server is told that nobody waits any more."""
    waits = Waits(inner)
    with (
        Gateway(waits, open=True, key="k") as gateway,
        open_sampler(gateway.url, tokenizer=inner.tokenizer, key="k", deadline=0.5) as sampler,
    ):
        with pytest.raises(rlkit.errors.BackendTimeout, match=r"no answer within 0\.5 s"):
            sampler.sample([1], PARAMS).result(30)
        assert waits.dropped.wait(30)


def test_answers_of_another_kind_are_refused(inner):
    """Tokens of another vocabulary, missing logprobs, an aborted completion, the wrong number of choices."""
    good = {"index": 0, "token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
    read = lambda *choices: read_samples({"choices": list(choices)}, "here", np.array([1]), PARAMS, 1, 0, 100)  # noqa: E731
    assert read(good)[0].tokens.tolist() == [5]
    assert read({**good, "token_ids": [0]})[0].tokens.tolist() == [0]
    for change, what in (
        ({"token_ids": [100]}, "of another model"),
        ({"logprobs": None}, "0 logprobs"),
        ({"logprobs": {"token_logprobs": [None]}}, "None is not a logprob"),
        ({"logprobs": {"token_logprobs": [False]}}, "False is not a logprob"),
        ({"logprobs": {"token_logprobs": [float("nan")]}}, "nan is not a logprob"),
        ({"logprobs": {"token_logprobs": [-(10**400)]}}, "is not a logprob"),
        ({"token_ids": [True]}, "token ids"),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "0 tokens; expected 1 to 5"),
        ({"token_ids": [1] * 6, "logprobs": {"token_logprobs": [-1] * 6}}, "6 tokens; expected 1 to 5"),
        ({"logprobs": {"token_logprobs": [-1.0, -1.0]}}, "1 tokens and 2 logprobs"),
        ({"logprobs": {"token_logprobs": [3.0]}}, "3.0 is not a logprob, .* at most 0; .*processed_logprobs"),
        ({"finish_reason": "abort"}, "abort"),
        ({"index": 1}, "choice 1"),
        ({"token_ids": "x"}, "token ids"),
        ({"token_ids": [-1]}, "token ids"),
    ):
        with pytest.raises(rlkit.BackendError, match=what):
            read({**good, **change})
    with pytest.raises(rlkit.BackendError, match="2 choices; expected 1"):
        read(good, good)
    tokens, entry = np.array([3, 4]), {"logprob": -1.0}
    for rows, top, what in (
        (None, 0, "do not cover each of 2 tokens"),
        ([None], 0, "do not cover each of 2 tokens"),
        ([None, {"5": entry}], 0, "lacks token 4 of the prompt"),
        ([None, None], 0, "expected token ids with logprobs"),
        ([None, {"4": {"logprob": None}}], 0, "None is not a logprob"),
        ([None, {"4": {"logprob": float("nan")}}], 0, "nan is not a logprob"),
        ([None, {"4": {"logprob": 5.0}}], 0, "5.0 is not a logprob"),
        ([None, {"4": entry, "-5": entry}], 0, "expected token ids with logprobs"),
        ([None, {"4": entry}], 2, "has 1 alternatives; expected 2"),
    ):
        with pytest.raises(rlkit.BackendError, match=what):
            read_scores({"choices": [{"prompt_logprobs": rows}]}, "here", tokens, top)


def test_what_a_refusal_means():
    """A server that is gone may be asked again elsewhere; one of another kind, or a refused request, may not."""
    for status, said, kind in (
        (503, "busy", ServerLost),
        (500, '{"error": {"message": "EngineCore encountered an issue"}}', ServerLost),
        (500, '{"error": {"message": "LoRA rank 64"}}', rlkit.BackendError),
        (404, '{"error": {"message": "The model `m` does not exist."}}', ModelMissing),
        (404, '{"detail": "Not Found"}', rlkit.UnsupportedError),
        (405, '{"detail": "Method Not Allowed"}', rlkit.UnsupportedError),
        (400, '{"detail": "Not Found"}', rlkit.BackendError),
    ):
        assert type(_refusal("here/v1/completions", status, said)) is kind, (status, said)
    assert type(_refusal("here/health", 500, "")) is ServerLost
