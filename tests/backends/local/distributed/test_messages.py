"""What ranks say to one another arrives as it was."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit

pytest.importorskip("peft")

import torch

from rlkit._seeds import streams
from rlkit.backends.local.distributed import _messages as messages
from rlkit.backends.local.sampling.sampler import SampleRequest, ScoreRequest, Snapshot
from rlkit.backends.local.training.micro_batches import pack
from rlkit.backends.local.training.trainer import Inputs
from rlkit.backends.requests import Stop

SNAPSHOT = Snapshot(3, 1.0, {})
PROMPT = np.array([5, 6, 7])


def there(part):
    """What another rank gets."""
    return messages.unpack(*messages.pack(part))


def test_parts():
    """Header and tensors of every shape, empty ones too; a tensor of another dtype is refused."""
    tensors = [torch.arange(6.0).reshape(2, 3), torch.zeros(0, dtype=torch.int64), torch.tensor(2.5).double()]
    tensors += [torch.tensor([True, False]), torch.zeros(2, 0)]
    header, got = there(({"order": "tick", "x": [1, None, "ü"]}, tensors))
    assert header == {"order": "tick", "x": [1, None, "ü"]}
    for sent, found in zip(tensors, got, strict=True):
        assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
        assert torch.equal(found, sent)
    assert there(messages.IDLE) == ({}, [])
    with pytest.raises(KeyError, match="bfloat16"):
        there(({}, [torch.zeros(1, dtype=torch.bfloat16)]))


def test_micro_batches():
    """With shared prefixes, ids and temperatures, each of which may not be there."""
    data = [rlkit.Datum.supervised(PROMPT, [8 + i, 9]) for i in range(3)]
    (batch,) = pack(data, 100)
    for ids, warm in ((None, None), (torch.arange(6), None), (torch.arange(6), torch.ones(6)), (None, torch.ones(6))):
        sent = Inputs(batch, {"entropy": None, "logprobs": ids}, warm)
        got = messages.unpack_inputs(there(messages.pack_inputs(sent)), torch.device("cpu"))
        for name in ("tokens", "positions", "index"):
            assert np.array_equal(getattr(got.batch, name), getattr(batch, name))
        assert got.batch.runs == batch.runs
        assert [*got.wanted] == ["entropy", "logprobs"]
        for a, b in ((got.wanted["logprobs"], ids), (got.temperatures, warm), (got.wanted["entropy"], None)):
            assert a is None if b is None else torch.equal(a, b)


def test_requests_and_results():
    """Stops of both kinds, seeds, mixed versions, scores and errors."""
    tokenizer = rlkit.connect("toy").tokenizer
    for stop in (None, (), (3, 4), ("x", "yz")):
        params = rlkit.SamplingParams(max_tokens=4, temperature=0.5, top_k=3, stop=stop)
        sent = SampleRequest(SNAPSHOT, PROMPT, params, Stop(stop, tokenizer), streams(7, 2), 4, 7)
        got = messages.unpack_request(there(messages.pack_request(sent)), SNAPSHOT, tokenizer)
        assert (got.params, got.limit, got.seed, len(got.rngs)) == (params, 4, 7, 2)
        assert [rng.random() for rng in got.rngs] == [rng.random() for rng in sent.rngs]
        assert np.array_equal(got.prompt, PROMPT)
    drawn = {"stop_reason": "length", **params.sampling_options}
    samples = [
        rlkit.Sample(PROMPT, [8, 9], [-1.0, -0.5], versions=np.array(versions), **drawn)
        for versions in ([2, 3], [3, 3])
    ]
    got.future.set_result(samples)
    found = messages.unpack_result(sent, there(messages.pack_result(got)))
    for a, b in zip(found, samples, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
        assert (a.token_versions.tolist(), a.stop_reason, a.version) == (b.token_versions.tolist(), "length", b.version)
    sent = ScoreRequest(SNAPSHOT, PROMPT, np.array([[5, -1], [6, 2], [7, 3]]), 0.7, 1)
    got = messages.unpack_request(there(messages.pack_request(sent)), SNAPSHOT, tokenizer)
    assert (got.temperature, got.top, got.ids.tolist()) == (0.7, 1, sent.ids.tolist())
    got.future.set_result((got.ids, np.ones((3, 2), np.float32)))
    ids, logprobs = messages.unpack_result(sent, there(messages.pack_result(got)))
    assert (ids.tolist(), logprobs.tolist()) == (sent.ids.tolist(), [[1.0, 1.0]] * 3)
    failed = ScoreRequest(SNAPSHOT, PROMPT, sent.ids)
    failed.future.set_exception(rlkit.BackendError("no memory"))
    assert there(messages.pack_result(failed)) == ({"error": "BackendError: no memory"}, [])
