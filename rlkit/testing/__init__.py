"""Helpers for the tests of rlkit, of third-party backends, and of users' own loops.

Each name is imported when it is first used; ``BackendConformance`` needs pytest, the rest does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit._runtime import lazy_names

if TYPE_CHECKING:
    from rlkit.testing._faketinker import FakeTinker, Fault, SeenRequest
    from rlkit.testing.conformance import BackendConformance

__all__ = ["BackendConformance", "FakeTinker", "Fault", "SeenRequest"]

if not TYPE_CHECKING:
    _PLACES = {
        "BackendConformance": "rlkit.testing.conformance",
        "FakeTinker": "rlkit.testing._faketinker",
        "Fault": "rlkit.testing._faketinker",
        "SeenRequest": "rlkit.testing._faketinker",
    }
    __getattr__, __dir__ = lazy_names(__name__, _PLACES)
