"""``BackendConformance``: the required behaviour of every backend, as one class of tests to inherit."""

from __future__ import annotations

from rlkit.testing.conformance._calls import CallTests, FailureTests
from rlkit.testing.conformance._gradients import GradientTests, ScoreTests
from rlkit.testing.conformance._input import InputTests, SavingTests
from rlkit.testing.conformance._sampling import SamplingTests

__all__ = ["BackendConformance"]


class BackendConformance(SamplingTests, ScoreTests, GradientTests, CallTests, FailureTests, SavingTests, InputTests):
    """The conformance suite: inherit, write ``make``, and pytest runs it on your backend.

    ::

        class TestMine(BackendConformance):
            skips = {"test_greedy_repeats": "the service has no greedy sampling"}

            def make(self, folder, **options):
                return MyBackend(folder=folder, **options)

    ``make`` is given seed=, and resume_from= or init_from= in the tests of saving; two backends that it makes with
    the same options must start alike. Tests named in ``skips`` are skipped with the reason given; a name that no test
    has is an error. ``offers = ()`` says that samplers refuse min_p and penalties, as the toy's do; ``Harness`` has
    the other switches.
    """
