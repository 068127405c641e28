"""Names and addresses of this machine, and how many connections it can hold."""

from __future__ import annotations

import importlib
import ipaddress

__all__ = ["is_loopback", "is_own_name", "most_connections"]

_OTHER_FILES = 128


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own.

    >>> is_loopback("localhost"), is_loopback("127.8.0.1"), is_loopback("::1"), is_loopback("example.org")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_name(header: str | None) -> bool:
    """Return whether a Host header names this machine, by "localhost" or a loopback address; also where it is missing.

    A web page whose owner lets its name resolve to this machine asks under that name.

    >>> is_own_name("127.0.0.1:8000"), is_own_name("[::1]:8000"), is_own_name("page.example:8000"), is_own_name(None)
    (True, True, False, True)
    """
    if header is None:
        return True
    name = header.strip().lower()
    return is_loopback(name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0])


def most_connections(limit: int) -> int:
    """Return ``limit``, or what the files that this process may have open leave room for, >= 16.

    >>> most_connections(20)
    20
    """
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # not a Unix
        return limit
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if files < 0 else max(16, min(limit, files - _OTHER_FILES))
