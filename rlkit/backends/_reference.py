"""Logprobs of what was sampled under another policy: the reference of a KL, a teacher, or the policy with a hint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkit import _check
from rlkit.backends.protocol import Sampler
from rlkit.errors import ConfigError, DataError
from rlkit.futures import Future
from rlkit.types import Datum, Sample

__all__ = ["reference_logprobs"]


def reference_logprobs(
    sampler: Sampler, samples: Sequence[Sample | Datum], *, prefixes: Sequence[object] | None = None
) -> Future[list[np.ndarray]]:
    """Return the logprobs of the samples' own tokens under another policy, for a KL to it or for distillation.

    They are asked for at the temperature that each was sampled at (greedy ones: at 1). With ``prefixes`` each sample is
    scored after some more tokens, such as a message with the right answer: the policy is then its own teacher.

    Args:
        sampler: the reference or teacher: ``policy.base_sampler()``, or ``rlkit.sampler(...)`` with a saved path.
        samples: samples, or datums, whose masked-in tokens are meant.
        prefixes: token ids [P_i] put in front of each, one array per sample, which may be empty.

    Returns:
        A future of one float32 [n] for each, as ``sample.datum(reference_logprobs=...)`` and
        ``datum.with_inputs(reference_logprobs=...)`` take it.

    Raises:
        ConfigError: ``sampler`` has no logprobs.
        DataError: ``samples`` are something else, prefixes are not as many or no token ids, or a sample does not fit
            into the sampler's context together with its prefix.

    >>> import rlkit
    >>> policy = rlkit.connect("toy", seed=0)
    >>> samples = policy.sampler().result().sample([65], rlkit.SamplingParams(max_tokens=3), n=2).result()
    >>> found = reference_logprobs(policy.base_sampler().result(), samples).result()
    >>> [bool(np.allclose(lp, s.logprobs)) for lp, s in zip(found, samples)]  # nothing was trained yet
    [True, True]

    Source: none needed; the prefix is self-distillation's, arXiv:2601.18734 (OPSD) and arXiv:2601.20802 (SDPO).
    """
    if not callable(getattr(sampler, "logprobs", None)):
        what, expected = f"got {_check.describe(sampler)}", "a sampler, such as policy.base_sampler().result() gives"
        raise ConfigError("reference_logprobs(sampler)", what, expected)
    if isinstance(samples, (Sample, Datum, str)) or not isinstance(samples, Sequence):
        raise DataError("reference_logprobs(samples)", f"got {_check.describe(samples)}", "a list of samples or datums")
    datums = [_datum(i, sample) for i, sample in enumerate(samples)]
    heads = [np.zeros(0, np.int64)] * len(datums) if prefixes is None else _prefixes(sampler, datums, prefixes)
    asked = [_asked(sampler, head, datum) for head, datum in zip(heads, datums, strict=True)]
    return Future.all(
        asked, lambda arrays: [d.select(x[head.size :]) for d, head, x in zip(datums, heads, arrays, strict=True)]
    )


def _asked(sampler: Sampler, head: np.ndarray, datum: Datum) -> Future[np.ndarray]:
    """Ask for the logprobs [P + T] of a datum after ``head``, where its mask is 1 at least."""
    tokens, temperature = np.concatenate([head, datum.tokens]), datum.temperature or 1.0
    if hasattr(sampler, "masked_logprobs"):  # cheaper than the logprobs of the whole text
        mask = np.concatenate([np.zeros(head.size, bool), datum.mask])
        asked: Future[np.ndarray] = sampler.masked_logprobs(tokens, mask, temperature=temperature)
        return asked
    return sampler.logprobs(tokens, temperature=temperature)


def _prefixes(sampler: Sampler, datums: Sequence[Datum], prefixes: Sequence[object]) -> list[np.ndarray]:
    if isinstance(prefixes, (str, bytes)) or len(prefixes) != len(datums):
        raise DataError("reference_logprobs(prefixes)", f"has {len(prefixes)}", f"{len(datums)}", "one per sample")
    size = sampler.tokenizer.vocab_size
    heads = [_check.token_ids(f"prefixes[{i}]", prefix, vocab_size=size) for i, prefix in enumerate(prefixes)]
    for i, (head, datum) in enumerate(zip(heads, datums, strict=True)):
        if head.size + len(datum) > sampler.max_length:
            what = f"has {head.size} tokens, but the sample has {len(datum)}"
            raise DataError(f"prefixes[{i}]", what, f"together <= {sampler.max_length}", "the context")
    return heads


def _datum(i: int, sample: Sample | Datum) -> Datum:
    _check.require(isinstance(sample, (Sample, Datum)), f"samples[{i}]", sample, "a Sample or a Datum", error=DataError)
    return sample.datum() if isinstance(sample, Sample) else sample
