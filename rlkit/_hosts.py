"""Names and addresses of this machine, and how many connections it can hold."""

from __future__ import annotations

import importlib
import ipaddress
from collections.abc import Mapping
from typing import Any

__all__ = ["LET_IN", "is_loopback", "is_own_name", "is_web_page", "let_in", "most_connections"]

LET_IN = "rlkit.let_in"  # of an ASGI scope

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

    A web page whose owner lets its name resolve to this machine sends requests under that name.

    >>> is_own_name("127.0.0.1:8000"), is_own_name("[::1]:8000"), is_own_name("page.example:8000"), is_own_name(None)
    (True, True, False, True)
    """
    if header is None:
        return True
    name = header.strip().lower()
    return is_loopback(name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0])


def is_web_page(headers: Mapping[str, str]) -> bool:
    """Return whether a page of another site sent a request; names of ``headers`` are in lower case.

    >>> is_web_page({"origin": "https://page.example"}), is_web_page({"sec-fetch-site": "none"}), is_web_page({})
    (True, False, False)
    """
    return "origin" in headers or headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def let_in(scope: Mapping[str, Any]) -> None:
    """Tell the listener, if there is one, that the client of a request may use the service."""
    scope.get(LET_IN, bool)()


def most_connections(limit: int) -> int:
    """Return ``limit``, or fewer if this process may not have as many files open; at least 16.

    >>> most_connections(20)
    20
    """
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # not a Unix
        return limit
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if files < 0 else max(16, min(limit, files - _OTHER_FILES))
