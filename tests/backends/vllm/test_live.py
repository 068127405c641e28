"""A policy that a server with vLLM's endpoints samples, updated while its requests run."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import rlkit
from rlkit.backends.vllm import _sampler as module
from tests.backends.vllm import test_real
from tests.backends.vllm.test_engine import connected, eventually, server, step  # noqa: F401  # a fixture

pytest.importorskip("httpx")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers
PROMPT = [5, 6, 7, 8]
model = test_real.model  # a fixture


def pausing(standin, at):
    """Have the stand-in wait, before some of the tokens that it draws, until what it draws is aborted.

    Returns:
        An event for each of ``at``, set when it waits there.
    """
    events, logits, calls = [threading.Event() for _ in at], standin.logits, [0]

    def waiting(name, tokens):
        if tokens[: len(PROMPT)] == PROMPT and threading.current_thread() is not threading.main_thread():
            calls[0] += 1
            if calls[0] in at:
                before = len(standin.aborted)
                events[at.index(calls[0])].set()
                standin._lock.release()  # others are answered meanwhile
                try:
                    eventually(lambda: len(standin.aborted) > before)
                finally:
                    standin._lock.acquire()
        return logits(name, tokens)

    standin.logits = waiting
    return events


def test_requests_go_on_under_the_newer_adapter(tiny, tmp_path, server):  # noqa: F811
    """Two updates in one request: each token has the logprob of its version, as snapshots of those give it."""
    params = rlkit.SamplingParams(max_tokens=24, stop=())
    with connected(tiny, tmp_path, server.url) as policy:
        live = policy.live_sampler().result()
        assert live.switches == "token"
        frozen = [policy.sampler().result()]
        free = live.sample(PROMPT, params, seed=3).result()[0]
        assert free.tokens.tolist() == frozen[0].sample(PROMPT, params, seed=3).result()[0].tokens.tolist()
        here = pausing(server.standin, [5, 12])
        running = live.sample(PROMPT, params, seed=3)
        for version, event in enumerate(here, 1):
            assert event.wait(30)
            step(policy)
            update = live.update()
            newest = policy.sampler()
            assert update.result() == version == live.version
            frozen.append(newest.result())
        (sample,) = running.result()
        assert sample.token_versions.tolist() == sorted(sample.token_versions)
        assert {*sample.token_versions} == {0, 1, 2}
        assert sample.tokens.size == 24
        assert sample.tokens[:5].tolist() == free.tokens[:5].tolist()
        text = np.concatenate([sample.prompt, sample.tokens])
        for version, sampler in enumerate(frozen):
            own = sample.token_versions == version
            theirs = sampler.logprobs(text).result()[len(PROMPT) :]
            np.testing.assert_allclose(sample.logprobs[own], theirs[own], atol=1e-4)
            assert np.abs(sample.logprobs[~own] - theirs[~own]).max() > 1e-3


def test_groups_and_stops(tiny, tmp_path, server):  # noqa: F811
    """Members of a group differ and go on each by itself; a stop text that began before an update ends a sample."""
    params = rlkit.SamplingParams(max_tokens=20, stop=())
    with connected(tiny, tmp_path, server.url) as policy:
        live = policy.live_sampler().result()
        (event,) = pausing(server.standin, [4])
        running = live.sample(PROMPT, params, n=3, seed=1)
        assert event.wait(30)
        step(policy)
        live.update().result()
        samples = running.result()
        assert len({s.tokens.tobytes() for s in samples}) == 3
        assert all({*s.token_versions.tolist()} <= {0, 1} for s in samples)
        mixed = next(s for s in samples if s.versions is not None)
        assert mixed.tokens.size == 20


def test_a_stop_text_across_an_update(tiny, tmp_path, server, monkeypatch):  # noqa: F811
    """It ends the sample where the server, which sees its second half alone, goes on."""
    params = rlkit.SamplingParams(max_tokens=20, stop=())
    with connected(tiny, tmp_path, server.url) as policy:
        live = policy.live_sampler().result()
        (event,) = pausing(server.standin, [6])
        monkeypatch.setattr(module, "Stop", lambda stop, tokenizer: lambda tokens: len(tokens) == 9)
        running = live.sample(PROMPT, params, seed=2)
        assert event.wait(30)
        step(policy)
        live.update().result()
        (sample,) = running.result()
        assert (sample.tokens.size, sample.token_versions.size, sample.stop_reason) == (9, 9, "stop")
        assert {*sample.token_versions.tolist()} == {0, 1}


def test_a_server_that_cannot_abort(tiny, tmp_path, server):  # noqa: F811
    """Requests end as they began there, which the sampler says."""
    server.standin.faults.add("deaf")
    with connected(tiny, tmp_path, server.url) as policy:
        live = policy.live_sampler().result()
        assert live.switches == "request"
        step(policy)
        assert live.update().result() == 1
        assert live.sample(PROMPT, rlkit.SamplingParams(max_tokens=2), seed=0).result()[0].version == 1


def test_what_cannot_be_continued(tiny, tmp_path, server):  # noqa: F811
    with connected(tiny, tmp_path, server.url) as policy:
        live = policy.live_sampler().result()
        for name in ("presence_penalty", "frequency_penalty"):
            with pytest.raises(rlkit.UnsupportedError, match=name):
                live.sample(PROMPT, rlkit.SamplingParams(max_tokens=2, **{name: 0.5}))
        live.close()
        with pytest.raises(rlkit.BackendError, match="closed"):
            live.sample(PROMPT, rlkit.SamplingParams(max_tokens=2))


def test_cancelled_in_an_update(tiny, tmp_path, server):  # noqa: F811
    params = rlkit.SamplingParams(max_tokens=20, stop=())
    with connected(tiny, tmp_path, server.url) as policy:
        live = policy.live_sampler().result()
        (event,) = pausing(server.standin, [4])
        running = live.sample(PROMPT, params, seed=1)
        assert event.wait(30)
        assert running.cancel()
        server.standin.aborted.add("all")
        step(policy)
        assert live.update().result() == 1
        assert live.sample(PROMPT, params, seed=1).result()[0].version == 1


@pytest.mark.skipif(not test_real.PYTHON, reason="RLKIT_VLLM_PYTHON names no interpreter with vllm")
@pytest.mark.timeout(1800)
def test_vllm_itself(model, tmp_path):
    """Groups that run while adapters change: tokens have their versions, and the logprobs that those give them."""
    params = rlkit.SamplingParams(max_tokens=110, stop=())
    options = {"lora": test_real.LORA, "seed": 0, "device": "cpu", "folder": tmp_path}
    with (
        test_real.serving(model, "--enable-scale-out") as (url, _),
        rlkit.connect("local", model=model, sampler=url, **options) as policy,
    ):
        live, frozen, drew = policy.live_sampler().result(), {}, set()
        assert live.switches == "token"
        for seed in range(6):
            running = live.sample(PROMPT, params, n=6, seed=seed)
            for _ in range(2):
                snapshot = policy.sampler().result()
                frozen[snapshot.version] = snapshot
                step(policy)
                live.update().result()
            for sample in running.result():
                assert sample.tokens.size == 110
                text = np.concatenate([sample.prompt, sample.tokens])
                frozen.setdefault(live.version, policy.sampler().result())
                for version in {*sample.token_versions.tolist()}:
                    own = sample.token_versions == version
                    theirs = frozen[version].logprobs(text).result()[len(PROMPT) :]
                    np.testing.assert_allclose(sample.logprobs[own], theirs[own], atol=1e-3)
                drew.add(len({*sample.token_versions.tolist()}))
            if max(drew) > 1:
                break
        assert max(drew) > 1
