"""For the tests of rlkit, of backends that others write, and of users' own loops (needs pytest)."""

from __future__ import annotations

from rlkit.testing.conformance import BackendConformance
from rlkit.testing.faketinker import FakeTinker, Seen
from rlkit.testing.faults import Fault

__all__ = ["BackendConformance", "FakeTinker", "Fault", "Seen"]
