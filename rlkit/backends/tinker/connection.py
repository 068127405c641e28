"""Connections to the service: key, address, model, and how long to wait for them."""

from __future__ import annotations

import concurrent.futures
import difflib
import importlib
import json
import os
import re
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import attrs

from rlkit import _check, _runtime
from rlkit._runtime import is_loopback
from rlkit.backends import saves
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.tinker import guard
from rlkit.backends.tinker.guard import add_secret, clean, last_warning, redact, watch_logs
from rlkit.backends.tokenizers import reason_of, tokenizer_from
from rlkit.errors import BackendError, BackendTimeout, CheckpointError, ConfigError, RlkitError, StepOutcomeUnknown

if TYPE_CHECKING:
    from tinker import SamplingClient, ServiceClient, TrainingClient
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Address",
    "Saved",
    "bounded",
    "check_model",
    "checked_path",
    "hosted",
    "late",
    "name_of",
    "not_offered",
    "read",
    "run_of",
    "sdk",
    "service_client",
    "status_of",
    "tokenizer_of",
    "translate",
]

_UNKNOWN = (
    "; the step may or may not have been applied. It is not sent again: connect anew with resume_from= and the path "
    "of the last saved state"
)
_STATUS = re.compile(r"(?:with status |status |Error code: )(\d{3})\b")
_ADVICE = {
    400: "the service refused the request as invalid",
    401: "the service rejected the API key (401); check api_key= or TINKER_API_KEY",
    402: "billing is not settled (402); see the account's console",
    403: "the API key lacks the permission for this (403)",
    404: "the service does not have it (404)",
    409: "it conflicts with an existing object, such as one of the same name (409)",
    410: "its session or its result has expired (410); connect anew",
    422: "the service refused the request as invalid (422)",
    429: "the service has no capacity, or the rate limit is reached (429)",
}


def translate(call: str, error: BaseException, *, step: bool = False, path: str | None = None) -> RlkitError:
    """Return the error to raise instead of ``error``, which becomes its cause.

    Args:
        call: what was being done.
        error: what the SDK raised.
        step: it was an optimizer step, so that not knowing its outcome has to be said.
        path: it was about this saved state.
    """
    if isinstance(error, RlkitError):
        return error
    clean(error)
    reason, definite = _reason(error)
    kind: type[RlkitError] = BackendError
    message = f"{call}: {reason}"
    if path is not None:
        kind, message = CheckpointError, f"{call}: {path}: {reason}"
    if step and not definite:
        kind, message = StepOutcomeUnknown, message + _UNKNOWN
    translated = kind(redact(message))
    translated.__cause__ = error
    return translated


def late(call: str, seconds: float, *, step: bool = False, link: guard.Link | None = None) -> RlkitError:
    """Return the error for a call that had no answer within its deadline.

    Args:
        call: what was being done.
        seconds: the deadline.
        step: it was an optimizer step.
        link: the connection, which knows of trouble that the SDK was trying to get over; None for the user's own.
    """
    message = f"{call}: no answer within {seconds:g} s (the deadline, an option of connect)"
    message += _trouble(link, seconds)
    return StepOutcomeUnknown(message + _UNKNOWN) if step else BackendTimeout(message)


def _trouble(link: guard.Link | None, seconds: float) -> str:
    """Return what went wrong in the last ``seconds``."""
    trouble = None if link is None else link.trouble
    ago = 0.0 if trouble is None else time.monotonic() - trouble.time
    if trouble is None or ago > seconds:
        said = last_warning(seconds)
        return "" if said is None else f"; the SDK's last warning: {said}"
    if trouble.status is None:
        text = f"the service cannot be reached: {trouble.text}"
    elif trouble.status == 408:
        text = f"the service postpones it: {trouble.text}" if trouble.text else "the service postpones it (408)"
    else:
        text = _advice(trouble.status) + (f": {trouble.text}" if trouble.text else "")
    return redact(f"; the last problem, {ago:.0f} s ago: {text}")


def _advice(status: int) -> str:
    return _ADVICE.get(status, f"the service failed ({status})" if status >= 500 else f"status {status}")


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that caused an error, where it is known."""
    status = getattr(error, "status_code", None)
    if status is None and isinstance(error, ValueError):
        match = _STATUS.search(str(error))
        status = int(match[1]) if match else None
    return status if isinstance(status, int) else None


def not_offered(error: BaseException) -> bool:
    """Return whether a server says that it does not have what was asked, or has it in another form."""
    if isinstance(error, json.JSONDecodeError):
        return False
    name, status = type(error).__name__, status_of(error)
    return status in (400, 404, 405, 422, 501) or name == "APIResponseValidationError" or isinstance(error, TypeError)


def _reason(error: BaseException) -> tuple[str, bool]:
    """Return (what happened, whether nothing can have been applied)."""
    name, text = type(error).__name__, str(error) or "no message"
    if name == "RequestFailedError":
        message = text.removeprefix("Request failed: ").partition(" for self.request_id=")[0]
        return f"the service reports: {message}", True
    if isinstance(error, json.JSONDecodeError):
        return f"the service's answer is not JSON: {error.msg}", False
    if isinstance(error, (concurrent.futures.CancelledError, TimeoutError)):
        return "it was cancelled", False
    if "poisoned" in text:
        return "an earlier call of this client failed, so it accepts no more; connect anew with resume_from=", True
    if name == "RetryableException":
        return "its result was lost: the session has expired, or the service no longer has it (410)", False
    status = status_of(error)
    if status == guard.LOST:
        return _detail(error), False
    if status is not None:
        if 300 <= status < 400:
            return f"the service redirects ({status}), which is not followed: it would pass on the key", False
        return f"{_advice(status)}: {_detail(error)}", False  # a proxy may say so, whatever the server did
    if isinstance(error, AttributeError) and "billing" in text:  # of the SDK's, where it meets a 402 while connecting
        return _advice(402), False
    if name in ("APIConnectionError", "APITimeoutError"):
        return f"the service cannot be reached: {text}", False
    return f"{name}: {text}", False


def _detail(error: BaseException) -> str:
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        for key in ("detail", "message", "error"):
            if isinstance(body.get(key), str):
                return str(body[key])
    return str(error)


_PATH = re.compile(r"tinker://(?P<run>[^/\s]+)/(?P<kind>weights|sampler_weights)/(?P<name>[^/\s]+)")
_NAME = re.compile(r".*-(?P<version>\d{6,})-(?P<optimizer>[ow])[0-9a-f]{8}")
_LABEL = 80


@attrs.frozen
class Saved:
    """What is known of a saved state: optimizer steps, whether its optimizer counts, and the stream of seeds."""

    version: int = 0
    optimizer: bool = True
    seed: int | None = None
    requests: int = 0


def check_label(name: object) -> str:
    """Return a label that a saved state's name can begin with, or raise a ConfigError."""
    label = saves.check_label(name)
    if len(label) > _LABEL:
        raise ConfigError("save(name)", f"has {len(label)} characters", f"at most {_LABEL}")
    return label


def name_of(label: str, version: int, *, optimizer: bool) -> str:
    """Return a name that is used once: reusing one has the SDK try again for minutes."""
    return f"{label}-{version:06d}-{'o' if optimizer else 'w'}{uuid.uuid4().hex[:8]}"


def notes(saved: Saved) -> dict[str, str]:
    """Return the metadata that the service keeps with the state."""
    return {"rlkit.seed": str(saved.seed), "rlkit.requests": str(saved.requests)}


def checked_path(where: str, path: object, *, kind: str = "weights") -> str:
    """Return ``path`` if it can be one.

    Raises:
        ConfigError: it is not text.
        CheckpointError: it is not a path of the service, or one of the other kind.
    """
    if not isinstance(path, str) or not path:
        raise ConfigError(where, f"got {_check.describe(path)}", "the path that save() returned")
    match = _PATH.fullmatch(path)
    if match is None:
        raise CheckpointError(
            f"{where}: {path!r} is not a saved state of the service; expected tinker://<run>/{kind}/<name>"
        )
    if match["kind"] != kind:
        use = "sampled from; use rlkit.sampler(path=)" if kind == "weights" else "trained from; use init_from="
        raise CheckpointError(f"{where}: {path} can only be {use}")
    return path


def run_of(path: str) -> str:
    """Return the run that saved it."""
    match = _PATH.fullmatch(path)
    return "" if match is None else match["run"]


def read(path: str, metadata: Mapping[str, str] | None) -> Saved:
    """Return what its name and its metadata say; a state that rlkit did not save is at version 0."""
    match = _NAME.fullmatch(path.rpartition("/")[2])
    version, optimizer = (0, True) if match is None else (int(match["version"]), match["optimizer"] == "o")
    metadata = metadata or {}
    seed, requests = metadata.get("rlkit.seed", ""), metadata.get("rlkit.requests", "")
    if not (seed.isdecimal() and requests.isdecimal()):
        return Saved(version, optimizer)
    return Saved(version, optimizer, int(seed), int(requests))


T = TypeVar("T")
_CONTACT = 60.0  # seconds for the first answer of a service; afterwards it may take as long as the deadline says
_TOKENIZER = 120.0  # and for reading a tokenizer, which may be downloaded


def sdk() -> ModuleType:
    """Return the package tinker. Raises ConfigError: it is not installed."""
    try:
        return importlib.import_module("tinker")
    except ImportError as error:
        raise ConfigError(f"connect('tinker') needs the package tinker: {_runtime.command('tinker')}") from error


@attrs.frozen
class Address:
    """Where a service is and who asks, as the options of ``TinkerBackend`` say it; ``repr`` hides the key."""

    base_url: str | None = None
    api_key: str | None = attrs.field(default=None, repr=False)
    project: str | None = None
    metadata: Mapping[str, str] | None = None
    resend: bool | None = None


def _find_key(given: str | None, *, local: bool) -> str | None:
    key = given or os.environ.get("TINKER_API_KEY") or None
    if key is None and local:
        return "tml-none"  # a server on this machine may want none, and the SDK wants one
    if key is not None and not key.startswith(("tml-", "eyJ")):
        raise ConfigError("api_key (or TINKER_API_KEY): expected a key that starts with 'tml-'; this one does not")
    return key


def _check_texts(options: Address) -> None:
    for name in ("base_url", "api_key", "project"):
        value = getattr(options, name)
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{name}: expected a non-empty string, or None to read the environment")


def service_client(options: Address, seconds: float) -> tuple[ServiceClient, guard.Link]:
    """Open a ``tinker.ServiceClient`` with a session, and the guard of its connections.

    Raises:
        ConfigError: no key, a key that cannot be one, or an address that would show it.
        BackendError: nothing listens at an address on this machine.
        BackendTimeout: the service does not answer.
    """
    tinker = sdk()
    _check_texts(options)
    address = options.base_url or os.environ.get("TINKER_BASE_URL") or None
    local = _checked_address(address)
    key = _find_key(options.api_key, local=local)
    if local and address is not None:
        _check_listening(address)
    add_secret(key)
    guard.install()
    watch_logs()
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

    where = "the Tinker service" if address is None else redact(address)
    try:
        client = bounded(make, min(seconds, _CONTACT))
    except BaseException as error:
        link.close()  # ends what the SDK still tries
        if isinstance(error, BackendTimeout):
            raise late(f"connect to {where}", min(seconds, _CONTACT), link=link) from error
        if isinstance(error, tinker.TinkerError) and "api_key" in str(error):
            raise ConfigError(
                "connect: no API key; set TINKER_API_KEY, give api_key=, or store one with `tinker auth login`"
            ) from error
        if isinstance(error, RlkitError) or not isinstance(error, Exception):
            raise
        raise translate("connect", error) from error
    watch_logs()  # the SDK has imported more of itself by now
    add_secret(getattr(client.holder, "_api_key", None))  # it may come from where only the SDK looks
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
    wrong = ConfigError("base_url", f"is {redact(address)!r}", "https://host, or http://127.0.0.1:port")
    try:
        parts = urllib.parse.urlsplit(address)
        _ = parts.port  # raises where it is none
    except ValueError as error:
        raise wrong from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    local = is_loopback(parts.hostname)
    if parts.scheme == "http" and not local:
        raise ConfigError(
            f"base_url: plain http would send the key to {parts.hostname} unencrypted; use https (http is only for "
            "this machine)"
        )
    return local


def _check_listening(address: str) -> None:
    """Raise BackendError where nothing listens on this machine, which the SDK would wait for."""
    parts = urllib.parse.urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=5.0).close()
    except OSError as error:
        where = redact(address)
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
                "tokenizer: the SDK finds none for this model on the hub; set tokenizer= to a directory or a "
                f"tokenizer ({redact(reason_of(error)).partition(chr(10))[0]})"
            ) from error
    inner = None if isinstance(given, Tokenizer) else getattr(given, "inner", None)
    if isinstance(inner, Tokenizer):  # what FakeTinker gives
        return inner
    return tokenizer_from(given)
