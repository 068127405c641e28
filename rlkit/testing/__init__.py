"""For the tests of rlkit, of backends that others write, and of users' own loops.

``BackendConformance`` needs pytest, and is imported when it is first asked for; the rest does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlkit.testing.faketinker import FakeTinker, Seen
from rlkit.testing.faults import Fault

if TYPE_CHECKING:
    from rlkit.testing.conformance import BackendConformance

__all__ = ["BackendConformance", "FakeTinker", "Fault", "Seen"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "BackendConformance":
            raise AttributeError(f"module 'rlkit.testing' has no attribute {name!r}")
        from rlkit.testing.conformance import BackendConformance

        return BackendConformance

    def __dir__() -> list[str]:
        return __all__
