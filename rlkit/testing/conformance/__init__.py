"""``BackendConformance``: the required behaviour of every backend, as one class of tests to inherit."""

from __future__ import annotations

from rlkit.testing.conformance._base import ConformanceBase
from rlkit.testing.conformance._sampling import SamplingTests, ScoreTests
from rlkit.testing.conformance._training import CallTests, FailureTests, GradientTests, SavingTests

__all__ = ["BackendConformance", "ConformanceBase", "SamplingTests", "ScoreTests"]


class BackendConformance(SamplingTests, ScoreTests, GradientTests, CallTests, FailureTests, SavingTests):
    """The conformance suite: inherit, write ``make``, and pytest runs it on your backend.

    ::

        class TestMine(BackendConformance):
            skips = {"test_greedy_repeats": "the service has no greedy sampling"}

            def make(self, folder, **options):
                return MyBackend(folder=folder, **options)

    ``make`` is given seed=, and resume_from= or init_from= in the tests of saving; two backends that it makes with
    the same options must start alike. Tests named in ``skips`` are skipped with the reason given; a name that no test
    has is an error. ``offers = ()`` says that samplers refuse min_p and penalties, as the toy's do;
    ``ConformanceBase`` has the other switches.
    """
