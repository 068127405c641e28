"""Scores behind a prefix, of several turns, and at the sample's temperature."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import rlkit
from rlkit.errors import ConfigError, DataError

PARAMS = rlkit.SamplingParams(max_tokens=5)


@pytest.fixture(scope="module")
def policy() -> Any:
    with rlkit.connect("toy", seed=0) as made:
        yield made


@pytest.fixture(scope="module")
def samples(policy: Any) -> Any:
    return policy.sampler().result().sample([65, 66], PARAMS, n=4).result()


def test_own_tokens_of_several_turns(policy: Any) -> None:
    """Of a datum with several turns its masked-in tokens count, wherever they stand."""
    datum = rlkit.Datum(np.arange(97, 107), np.isin(np.arange(10), [2, 3, 7]))
    with policy.base_sampler().result() as base:
        (found,) = rlkit.reference_logprobs(base, [datum]).result()
        np.testing.assert_array_equal(found, base.logprobs(datum.tokens).result()[[2, 3, 7]])


def test_prefixes(policy: Any, samples: Any) -> None:
    """Each entry behind its own prefix, which may be empty; another prefix, other scores."""
    prefixes = [[], [72], [72, 73, 74], np.array([80])]
    with policy.base_sampler().result() as base:
        found = rlkit.reference_logprobs(base, samples, prefixes=prefixes).result()
        plain = rlkit.reference_logprobs(base, samples).result()
        for sample, prefix, row in zip(samples, prefixes, found, strict=True):
            tokens = np.concatenate([np.array(prefix, np.int64), sample.prompt, sample.tokens])
            np.testing.assert_array_equal(row, base.logprobs(tokens).result()[-sample.tokens.size :])
        np.testing.assert_array_equal(found[0], plain[0])
        assert np.abs(found[2] - plain[2]).max() > 1e-6


def test_temperatures(policy: Any) -> None:
    """An entry is scored at the temperature that it was sampled at, behind a prefix too; a greedy one at 1."""
    with policy.base_sampler().result() as base:
        for temperature, at in ((0.5, 0.5), (0.0, 1.0)):
            (sample,) = base.sample([65], rlkit.SamplingParams(max_tokens=3, temperature=temperature)).result()
            (found,) = rlkit.reference_logprobs(base, [sample], prefixes=[[70]]).result()
            whole = np.concatenate([[70], sample.prompt, sample.tokens])
            np.testing.assert_array_equal(found, base.logprobs(whole, temperature=at).result()[2:])


def test_awaited(policy: Any, samples: Any) -> None:
    """The future can be awaited; nothing to score is nothing."""

    async def scored() -> Any:
        base = await policy.base_sampler()
        return await rlkit.reference_logprobs(base, samples, prefixes=[[72]] * 4)

    assert len(asyncio.run(scored())) == 4
    with policy.base_sampler().result() as base:
        assert rlkit.reference_logprobs(base, [], prefixes=[]).result() == []


def test_mistakes(policy: Any, samples: Any) -> None:
    """Prefixes that are not as many, no tokens, or too long, and what is no sampler or no list of samples."""
    with policy.base_sampler().result() as base:
        long = rlkit.Datum.supervised(np.full(base.max_length - 1, 65), [66])
        table: list[tuple[Any, Any, str]] = [
            (samples, [[72]], r"reference_logprobs\(prefixes\): has length 1"),
            (samples, "hint", r"reference_logprobs\(prefixes\)"),
            (samples[:1], ["hint"], r"prefixes\[0\]: got text"),
            (samples[:1], [[10**9]], r"prefixes\[0\]\[0\]"),
            ([long], [[72]], r"prefixes\[0\]: has 1 tokens, but the sample"),
            *[(wrong, None, r"reference_logprobs\(samples\)") for wrong in (samples[0], long, "text", None)],
            ([samples[0], 3], None, r"samples\[1\]"),
        ]
        for data, prefixes, message in table:
            with pytest.raises(DataError, match=rf"^{message}"):
                rlkit.reference_logprobs(base, data, prefixes=prefixes)
        rlkit.reference_logprobs(base, [long], prefixes=[[]]).result()
    with pytest.raises(ConfigError, match=r"^reference_logprobs\(sampler\)"):
        rlkit.reference_logprobs(policy, samples)
