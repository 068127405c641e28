"""``BackendConformance``: what every backend must do, as one class of tests to inherit."""

from __future__ import annotations

from rlkit.testing.conformance.calls import CallTests
from rlkit.testing.conformance.failures import FailureTests
from rlkit.testing.conformance.gradients import GradientTests
from rlkit.testing.conformance.input import InputTests
from rlkit.testing.conformance.sampling import SamplingTests
from rlkit.testing.conformance.saving import SavingTests
from rlkit.testing.conformance.scores import ScoreTests

__all__ = ["BackendConformance"]


class BackendConformance(SamplingTests, ScoreTests, GradientTests, CallTests, FailureTests, SavingTests, InputTests):
    """Inherit, write ``make``, and pytest runs the suite on your backend.

    ::

        class TestMine(BackendConformance):
            skips = {"test_greedy_repeats": "the service has no greedy sampling"}

            def make(self, folder, **options):
                return MyBackend(folder=folder, **options)

    ``make`` is given seed=, and resume_from= or init_from= in the tests of saving; two backends that it makes with
    the same options must start alike. Tests named in ``skips`` are skipped with the reason given; a name that no test
    has is an error. See ``rlkit.testing.conformance.harness.Harness`` for the other switches.
    """
