"""Logprobs of what was sampled under another policy: the reference of a KL, or a teacher."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkit import _check
from rlkit._calls import answered
from rlkit.backends.protocol import Sampler
from rlkit.errors import ConfigError, DataError
from rlkit.futures import Future
from rlkit.types import Datum, Sample

__all__ = ["reference_logprobs"]


@answered
def reference_logprobs(sampler: Sampler, samples: Sequence[Sample | Datum]) -> Future[list[np.ndarray]]:
    """The logprobs of the samples' own tokens under another policy, for a KL to it or for distillation.

    They are asked for at the temperature that each was sampled at (greedy ones: at 1).

    Args:
        sampler: the reference or teacher: ``policy.base_sampler()``, or ``rlkit.sampler(...)`` with a saved path.
        samples: samples, or datums, whose masked-in tokens are meant.

    Returns:
        A future of one float32 [n] for each, as ``sample.datum(reference_logprobs=...)`` and
        ``datum.with_inputs(reference_logprobs=...)`` take it.

    Raises:
        ConfigError: ``sampler`` has no logprobs.
        DataError: ``samples`` are something else.

    >>> import rlkit
    >>> policy = rlkit.connect("toy", seed=0)
    >>> samples = policy.sampler().result().sample([65], rlkit.SamplingParams(max_tokens=3), n=2).result()
    >>> found = reference_logprobs(policy.base_sampler().result(), samples).result()
    >>> [bool(np.allclose(lp, s.logprobs)) for lp, s in zip(found, samples)]  # nothing was trained yet
    [True, True]
    """
    if not callable(getattr(sampler, "logprobs", None)):
        what, expected = f"got {_check.shown(sampler)}", "a sampler, such as policy.base_sampler().result() gives"
        raise ConfigError(_check.problem("reference_logprobs(sampler)", what, expected))
    if isinstance(samples, (Sample, Datum, str)) or not isinstance(samples, Sequence):
        what = f"got {_check.shown(samples)}"
        raise DataError(_check.problem("reference_logprobs(samples)", what, "a list of samples or datums"))
    datums = [_datum(i, sample) for i, sample in enumerate(samples)]
    asked = [sampler.logprobs(datum.tokens, temperature=datum.temperature or 1.0) for datum in datums]
    return Future.all(asked, lambda arrays: [datum.select(x) for datum, x in zip(datums, arrays, strict=True)])


def _datum(i: int, sample: Sample | Datum) -> Datum:
    if not isinstance(sample, (Sample, Datum)):
        what = f"got {_check.shown(sample)}"
        raise DataError(_check.problem(f"samples[{i}]", what, "a Sample or a Datum"))
    return sample.datum() if isinstance(sample, Sample) else sample
