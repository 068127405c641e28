"""The SDK's errors in rlkit's terms, each with what to do about it."""

from __future__ import annotations

import concurrent.futures
import json
import re
import time
from typing import Any

from rlkit.backends.tinker import guard, secrets
from rlkit.errors import BackendError, BackendTimeout, CheckpointError, RlkitError, StepOutcomeUnknown

__all__ = ["late", "not_offered", "status_of", "translate"]

_STATUS = re.compile(r"(?:with status |status |Error code: )(\d{3})\b")
_ADVICE = {
    400: "it was refused as not valid",
    401: "the API key was not accepted (401), check api_key= or TINKER_API_KEY",
    402: "billing is not settled (402), see the account's console",
    403: "the API key may not do this (403)",
    404: "there is no such thing on the service (404)",
    409: "it conflicts with something that exists, such as a name that is taken (409)",
    410: "its session or its result has expired (410), connect anew",
    422: "it was refused as not valid (422)",
    429: "the service is out of capacity or the rate limit is reached (429)",
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
    secrets.clean(error)
    reason, definite = _reason(error)
    kind: type[RlkitError] = BackendError
    message = f"{call}: {reason}"
    if path is not None:
        kind, message = CheckpointError, f"{call}: {path}: {reason}"
    if step and not definite:
        kind = StepOutcomeUnknown
        message += (
            "; whether the step was applied is not known. It is not sent again: connect anew with resume_from= and the "
            "path of the last saved state"
        )
    translated = kind(secrets.redact(message))
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
    if step:
        return StepOutcomeUnknown(
            f"{message}; whether the step was applied is not known. It is not sent again: connect anew with "
            "resume_from= and the path of the last saved state"
        )
    return BackendTimeout(message)


def _trouble(link: guard.Link | None, seconds: float) -> str:
    """Return what went wrong in the last ``seconds``."""
    trouble = None if link is None else link.trouble
    ago = 0.0 if trouble is None else time.monotonic() - trouble.time
    if trouble is None or ago > seconds:
        said = secrets.last_warning(seconds)
        return "" if said is None else f"; the SDK's last warning: {said}"
    if trouble.status is None:
        text = f"the service cannot be reached: {trouble.text}"
    elif trouble.status == 408:
        text = f"the service puts it off: {trouble.text}" if trouble.text else "the service puts it off (408)"
    else:
        text = _advice(trouble.status) + (f": {trouble.text}" if trouble.text else "")
    return secrets.redact(f"; the last trouble, {ago:.0f} s ago: {text}")


def _advice(status: int) -> str:
    return _ADVICE.get(status, f"the service failed ({status})" if status >= 500 else f"status {status}")


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status behind an error, where it can be told."""
    status: Any = getattr(error, "status_code", None)
    if status is None and isinstance(error, ValueError):
        match = _STATUS.search(str(error))
        status = int(match[1]) if match else None
    return status if isinstance(status, int) else None


def not_offered(error: BaseException) -> bool:
    """Whether a server says that it does not have what was asked, or has it in another form."""
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
        return f"the service answered with something that is not JSON: {error.msg}", False
    if isinstance(error, (concurrent.futures.CancelledError, TimeoutError)):
        return "it was given up", False
    if "poisoned" in text:
        return "an earlier call of this client failed and it takes no more; connect anew with resume_from=", True
    if name == "RetryableException":
        return "its result is gone: the session has expired, or the service lost it (410)", False
    status = status_of(error)
    if status == guard.LOST:
        return _detail(error), False
    if status is not None:
        if 300 <= status < 400:
            return f"the service redirects elsewhere ({status}), which is not followed: the key would go with it", False
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
