"""Faults to inject into a fake server."""

from __future__ import annotations

import threading
from typing import Literal, TypeAlias

import attrs

from rlkit import _check
from rlkit._check import checked
from rlkit.errors import ConfigError

__all__ = ["Fault", "Faults", "Kind"]

_Status: TypeAlias = Literal["400", "401", "402", "403", "404", "408", "409", "410", "422", "429", "500", "502", "503"]
_Wire: TypeAlias = Literal["reset", "timeout", "slow", "bad_json", "empty", "lost", "redirect"]
Kind: TypeAlias = Literal[_Status, _Wire, "opfail", "paused_capacity", "paused_rate_limit"]
_KINDS: tuple[str, ...] = Kind.__args__  # type: ignore[attr-defined]


@attrs.frozen
class Fault:
    """One way in which a server fails.

    Args:
        kind: an HTTP status; "reset" (the connection breaks), "timeout" (no answer within the client's patience, which
            is cut short), "slow" (the answer comes ``seconds`` late), "bad_json" (status 200, half a body), "empty"
            (status 200, no body), "lost" (the server closes without an answer), "redirect" (307, elsewhere), "opfail"
            (of a request that is carried out later, "before": it is accepted, and fails there),
            "paused_capacity" and "paused_rate_limit" (of "retrieve_future": not yet, the queue is paused; answered
            after ``seconds``, as the client asks again at once).
        endpoint: which requests, by the last part of the path ("optim_step", "forward_backward", "retrieve_future",
            "asample", ...); "*" for all.
        when: "before" the request had an effect, or "after" it had: the operation is carried out and its answer lost.
        times: how many requests; None for all.
        skip: how many matching requests pass before the first that fails.
        operation: with "retrieve_future", only results of that operation ("optim_step", "forward_backward", ...).
        seconds: of "slow" and of the pauses.

    >>> Fault("503", "optim_step", when="after", times=3)
    Fault(kind='503', endpoint='optim_step', when='after', times=3, skip=0, operation=None, seconds=1.0)
    """

    kind: Kind
    endpoint: str = "*"
    when: Literal["before", "after"] = "before"
    times: int | None = checked(1, _check.integer, none=True, low=1)
    skip: int = checked(0, _check.integer, low=0)
    operation: str | None = None
    seconds: float = checked(1.0, _check.real, low=0.0)

    def __attrs_post_init__(self) -> None:
        _check.choice("Fault.kind", self.kind, _KINDS)
        _check.choice("Fault.when", self.when, ("before", "after"))
        if self.kind == "opfail" and self.when == "after":
            raise ConfigError("Fault(kind='opfail'): an operation that failed had no effect; expected when='before'")

    def matches(self, endpoint: str, operation: str | None) -> bool:
        """Return whether it applies to such a request."""
        return self.endpoint in ("*", endpoint) and self.operation in (None, operation)


class Faults:
    """The remaining faults. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[tuple[Fault, list[int]]] = []  # fault, requests that matched

    def add(self, *faults: Fault) -> None:
        """Add faults; of those that match a request the first one applies."""
        with self._lock:
            self._left += [(fault, [0]) for fault in faults]

    def clear(self) -> None:
        """End all faults."""
        with self._lock:
            self._left.clear()

    def take(self, endpoint: str, operation: str | None) -> Fault | None:
        """Return the fault of this request, and count it as used."""
        with self._lock:
            for fault, matched in self._left:
                if not fault.matches(endpoint, operation):
                    continue
                matched[0] += 1
                if matched[0] > fault.skip and (fault.times is None or matched[0] <= fault.skip + fault.times):
                    return fault
        return None
