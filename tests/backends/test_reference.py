"""Scores behind a prefix, of several turns, and at the sample's temperature."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import rlkit
from rlkit.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def base():
    with rlkit.connect("toy", seed=0) as policy, policy.base_sampler().result() as made:
        yield made


@pytest.fixture(scope="module")
def samples(base):
    return base.sample([65, 66], rlkit.SamplingParams(max_tokens=5), n=4).result()


def test_prefixes_and_temperatures(base, samples):
    """Each entry behind its own prefix, which may be empty, and at its temperature (greedy: 1); another one, others.

    Of a datum with several turns its masked-in tokens count, wherever they stand. The future can be awaited.
    """
    turns = rlkit.Datum(np.arange(97, 107), np.isin(np.arange(10), [2, 3, 7]))
    cold, greedy = (
        base.sample([65], rlkit.SamplingParams(max_tokens=3, temperature=temperature)).result()[0]
        for temperature in (0.5, 0.0)
    )
    data, at = [*samples, turns, cold, greedy], [1.0] * 5 + [0.5, 1.0]
    prefixes = [[], [72], [72, 73, 74], np.array([80]), [], [70], [70]]

    async def score():
        return await rlkit.reference_logprobs(base, data, prefixes=prefixes)

    found, plain = asyncio.run(score()), rlkit.reference_logprobs(base, data).result()
    for i, (each, prefix, temperature) in enumerate(zip(data, prefixes, at, strict=True)):
        datum = each if each is turns else each.datum()
        for row, head in ((found[i], np.array(prefix, np.int64)), (plain[i], np.zeros(0, np.int64))):
            whole = base.logprobs(np.concatenate([head, datum.tokens]), temperature=temperature).result()
            np.testing.assert_array_equal(row, whole[head.size :][datum.mask], err_msg=f"entry {i}, prefix {head}")
    assert np.abs(found[2] - plain[2]).max() > 1e-6
    assert rlkit.reference_logprobs(base, [], prefixes=[]).result() == []


def test_mistakes(base, samples):
    """Prefixes that are not as many, no tokens, or too long, and what is no sampler or no list of samples."""
    long = rlkit.Datum.supervised(np.full(base.max_length - 1, 65), [66])
    for data, prefixes, message in (
        (samples, [[72]], r"reference_logprobs\(prefixes\): has length 1"),
        (samples, "hint", r"reference_logprobs\(prefixes\)"),
        (samples[:1], ["hint"], r"prefixes\[0\]: got text"),
        (samples[:1], [[10**9]], r"prefixes\[0\]\[0\]"),
        ([long], [[72]], r"prefixes\[0\]: has 1 tokens, but the sample"),
        *[(wrong, None, r"reference_logprobs\(samples\)") for wrong in (samples[0], long, "text", None)],
        ([samples[0], 3], None, r"samples\[1\]"),
    ):
        with pytest.raises(DataError, match=rf"^{message}"):
            rlkit.reference_logprobs(base, data, prefixes=prefixes)
    rlkit.reference_logprobs(base, [long], prefixes=[[]]).result()
    with pytest.raises(ConfigError, match=r"^reference_logprobs\(sampler\)"):
        rlkit.reference_logprobs(object(), samples)
