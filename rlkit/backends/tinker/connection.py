"""Reaching the service: whose key, which address, which model, and how long to wait for that."""

from __future__ import annotations

import concurrent.futures
import difflib
import importlib
import os
import socket
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import attrs

from rlkit import _check, _install
from rlkit._hosts import is_loopback
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.tinker import faults, guard, secrets
from rlkit.backends.transformers_tokenizer import tokenizer_from
from rlkit.errors import BackendError, BackendTimeout, ConfigError, RlkitError

if TYPE_CHECKING:
    from tinker import SamplingClient, ServiceClient, TrainingClient
    from transformers import PreTrainedTokenizerBase

__all__ = ["Address", "bounded", "check_model", "hosted", "sdk", "service_client", "tokenizer_of"]

T = TypeVar("T")
_CONTACT = 60.0  # seconds for the first answer of a service; afterwards it may take as long as the deadline says
_TOKENIZER = 120.0  # and for reading a tokenizer, which may be downloaded


def sdk() -> ModuleType:
    """Return the package tinker. Raises ConfigError: it is not installed."""
    try:
        return importlib.import_module("tinker")
    except ImportError as error:
        raise ConfigError(f"connect('tinker') needs the package tinker: {_install.command('tinker')}") from error


@attrs.frozen
class Address:
    """Where a service is and who asks, as the options of ``TinkerBackend`` say it; ``repr`` hides the key."""

    base_url: str | None = None
    api_key: str | None = attrs.field(default=None, repr=False)
    project: str | None = None
    metadata: Mapping[str, str] | None = None
    resend: bool | None = None


def service_client(options: Address, seconds: float) -> tuple[ServiceClient, guard.Link]:
    """Open a ``tinker.ServiceClient`` with a session, and the guard of its connections.

    Raises:
        ConfigError: no key, a key that cannot be one, or an address that would show it.
        BackendError: nothing listens at an address on this machine.
        BackendTimeout: the service does not answer.
    """
    tinker = sdk()
    for name in ("base_url", "api_key", "project"):
        value = getattr(options, name)
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{name}: expected a text that is not empty, or None for the environment's")
    address = options.base_url or os.environ.get("TINKER_BASE_URL") or None
    local = _checked_address(address)
    key = options.api_key or os.environ.get("TINKER_API_KEY") or None
    if key is None and local:
        key = "tml-none"  # a server on this machine may want none, and the SDK wants one
    if key is not None and not key.startswith(("tml-", "eyJ")):
        raise ConfigError("api_key (or TINKER_API_KEY): expected a key that starts with 'tml-'; this one does not")
    if local and address is not None:
        _check_listening(address)
    secrets.hide(key)
    guard.install()
    secrets.watch_logs()
    link = guard.Link(resend=True if options.resend is None and hosted(address) else options.resend)

    def make() -> ServiceClient:
        client = tinker.ServiceClient(
            base_url=address,
            api_key=key,
            project_id=options.project,
            user_metadata=None if options.metadata is None else dict(options.metadata),
            default_headers_overrides={guard.HEADER: link.name},
        )
        _ = client.holder  # opens the session, which is where a wrong key or address shows
        return client

    where = "the Tinker service" if address is None else secrets.redact(address)
    try:
        client = bounded(make, min(seconds, _CONTACT))
    except BaseException as error:
        link.close()  # ends what the SDK still tries
        if isinstance(error, BackendTimeout):
            raise faults.late(f"connect to {where}", min(seconds, _CONTACT), link=link) from error
        if isinstance(error, tinker.TinkerError) and "api_key" in str(error):
            raise ConfigError(
                "connect: no API key; set TINKER_API_KEY, give api_key=, or store one with `tinker auth login`"
            ) from error
        if isinstance(error, RlkitError) or not isinstance(error, Exception):
            raise
        raise faults.translate("connect", error) from error
    secrets.watch_logs()  # the SDK has imported more of itself by now
    secrets.hide(getattr(client.holder, "_api_key", None))  # it may come from where only the SDK looks
    return client, link


def hosted(address: str | None) -> bool:
    """Return whether it is the service that the SDK is made for, which recognises repeated calls."""
    host = "" if address is None else urllib.parse.urlsplit(address).hostname or ""
    return address is None or host.endswith((".thinkingmachines.dev", ".thinkingmachines.ai"))


def check_model(model: str, known: Mapping[str, object]) -> None:
    """Raise ConfigError where the service lists its models and this is none of them."""
    if known and model not in known:
        close = difflib.get_close_matches(model, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"model: the service has no {model!r}; {hint}it has: {', '.join(sorted(known))}")


def bounded(function: Callable[[], T], seconds: float) -> T:
    """Return ``function()``, given up after ``seconds``: the SDK waits without a limit in places."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  # raised to the caller below
            future.set_exception(error)

    threading.Thread(target=run, name="rlkit-tinker-connect", daemon=True).start()
    concurrent.futures.wait([future], seconds)
    if not future.done():
        raise BackendTimeout(f"no answer within {seconds:g} s")
    return future.result()


def _checked_address(address: str | None) -> bool:
    """Return whether it is on this machine; raise ConfigError where the key would travel in clear."""
    if address is None:
        return False
    if "@" in address:
        raise ConfigError("base_url: holds a user name or password; give the key as api_key= or TINKER_API_KEY")
    form = _check.problem("base_url", f"is {secrets.redact(address)!r}", "https://host, or http://127.0.0.1:port")
    try:
        parts = urllib.parse.urlsplit(address)
        _ = parts.port  # raises where it is none
    except ValueError as error:
        raise ConfigError(form) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(form)
    local = is_loopback(parts.hostname)
    if parts.scheme == "http" and not local:
        raise ConfigError(
            f"base_url: {parts.hostname} would be sent the key over plain http; use https (http is for this machine "
            "alone)"
        )
    return local


def _check_listening(address: str) -> None:
    """Raise BackendError where nothing listens on this machine, which the SDK would wait for."""
    parts = urllib.parse.urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=5.0).close()
    except OSError as error:
        where = secrets.redact(address)
        raise BackendError(
            f"connect: no answer from {where} ({error.strerror or error}); is the server running?"
        ) from error


def tokenizer_of(
    given: str | os.PathLike[str] | Tokenizer | PreTrainedTokenizerBase | None,
    client: TrainingClient | SamplingClient,
    seconds: float,
) -> Tokenizer:
    """Return a tokenizer of a directory, a hub name, an object, or of None: the SDK's own choice.

    Raises:
        ConfigError: there is none, or it cannot be read within ``seconds``.
    """
    if given is None:
        try:
            given = bounded(client.get_tokenizer, min(seconds, _TOKENIZER))
        except Exception as error:
            raise ConfigError(
                "tokenizer: the SDK finds none for this model, which it looks for on a hub; give tokenizer= a "
                f"directory, or a tokenizer ({secrets.redact(str(error)).strip().partition(chr(10))[0]})"
            ) from error
    inner = None if isinstance(given, Tokenizer) else getattr(given, "inner", None)
    if isinstance(inner, Tokenizer):  # what FakeTinker gives
        return inner
    return tokenizer_from(given)
