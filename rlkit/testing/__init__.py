"""Helpers for the tests of rlkit, of third-party backends, and of users' own loops.

Each name is imported when it is first used; ``BackendConformance`` needs pytest, the rest does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit._runtime import lazy_names

if TYPE_CHECKING:
    from rlkit.testing._faketinker import FakeTinker, Seen
    from rlkit.testing.conformance import BackendConformance
    from rlkit.testing.faults import Fault

__all__ = ["BackendConformance", "FakeTinker", "Fault", "Seen"]

if not TYPE_CHECKING:
    _PLACES = {
        "BackendConformance": "rlkit.testing.conformance",
        "FakeTinker": "rlkit.testing._faketinker",
        "Fault": "rlkit.testing.faults",
        "Seen": "rlkit.testing._faketinker",
    }
    __getattr__, __dir__ = lazy_names(__name__, _PLACES)
