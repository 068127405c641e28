"""Names and addresses of this machine."""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback", "is_own_name"]


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
