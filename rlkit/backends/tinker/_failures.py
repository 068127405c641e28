"""The SDK's errors in rlkit's terms, and what keeps the SDK from sending again what may have been carried out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlkit._secrets import add_secret, redact
from rlkit.errors import BackendError, BackendTimeout, CheckpointError, RlkitError, StepOutcomeUnknown, UnsupportedError

if TYPE_CHECKING:
    import httpx
    from tinker.lib.internal_client_holder import InternalClientHolder

__all__ = ["LossFailed", "NoResend", "deadline_error", "forbid_resending", "hide_key", "status_of", "translate_error"]

_DEDUPLICATES = "X-Rlkit-Deduplicates"  # of an answer of rlkit's own server: repeated requests are recognised
_LOST = 424  # a status after which the SDK does not try again
_PAUSE = 0.3  # seconds before a server that failed is asked for a result again
_STATUS = re.compile(r"(?:with status |status |Error code: )(\d{3})\b")
_ADVICE = {
    401: "the service rejected the API key (401); check api_key= or TINKER_API_KEY",
    402: "billing is not settled (402); see the account's console",
    403: "the API key lacks the permission for this (403)",
    404: "the service does not have it (404)",
    410: "its session or its result has expired (410); connect anew",
    429: "the service has no capacity, or the rate limit is reached (429)",
}
_UNKNOWN = (
    "; the step may or may not have been applied. It is not sent again: connect anew with resume_from= and the path "
    "of the last saved state"
)


class LossFailed(Exception):
    """The error of a loss that runs here, on its way through the SDK; its only argument."""


def translate_error(call: str, error: BaseException, *, path: str | None = None) -> BaseException:
    """Return the error to raise instead of ``error``, which becomes its cause; a user's own stays as it is.

    Args:
        call: what was being done. The error of an "optim_step" says whether the step may have been applied.
        error: what the SDK raised.
        path: it was about this saved state.
    """
    if isinstance(error, LossFailed):
        return error.args[0]  # type: ignore[no-any-return]
    if isinstance(error, RlkitError):
        return error
    reason, definite = _explain(error)
    translated: RlkitError
    if path is not None:
        translated = CheckpointError(redact(f"{call}: {path}: {reason}"))
    elif call == "optim_step" and not definite:
        translated = StepOutcomeUnknown(redact(f"{call}: {reason}") + _UNKNOWN)
    else:
        translated = BackendError(redact(f"{call}: {reason}"))
    translated.__cause__ = error
    return translated


def deadline_error(call: str, seconds: float) -> BackendError:
    """Return the error for a call that had no answer within its deadline."""
    message = f"{call}: no answer within {seconds:g} s (the deadline, an option of connect)"
    when, warning = _KEYS.warning
    if time.monotonic() - when <= max(seconds, 60.0):  # such as a pause for capacity, of which it warns once a minute
        message += f"; the SDK's last warning: {warning}"
    return StepOutcomeUnknown(message + _UNKNOWN) if call == "optim_step" else BackendTimeout(message)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that caused an error, where it is known."""
    if type(error).__name__ == "RetryableException":  # the result was lost
        return 410
    if isinstance(error, AttributeError) and "billing" in str(
        error
    ):  # the SDK's, where it meets a 402 while connecting
        return 402
    status = getattr(error, "status_code", None)
    if status is None and isinstance(error, ValueError):  # the SDK's, where a result cannot be fetched
        match = _STATUS.search(str(error))
        status = int(match[1]) if match else None
    return status if isinstance(status, int) else None


def _explain(error: BaseException) -> tuple[str, bool]:
    """Return (what happened, whether nothing can have been applied)."""
    name, text, status = type(error).__name__, str(error) or "no message", status_of(error)
    if name == "RequestFailedError":
        message = text.removeprefix("Request failed: ").partition(" for self.request_id=")[0]
        return f"the service reports: {message}", True
    if "poisoned" in text:
        return "an earlier call of this client failed, so it accepts no more; connect anew with resume_from=", True
    if status is not None:  # a proxy may say so, whatever the server did
        body = getattr(error, "body", None)
        found = [body.get(key) for key in ("detail", "message", "error")] if isinstance(body, dict) else []
        detail = next((each for each in found if isinstance(each, str)), text)
        failed = f"the service {'failed' if status >= 500 else 'refused the request'} ({status})"
        return (detail if status == _LOST else f"{_ADVICE.get(status, failed)}: {detail}"), False
    if name in ("APIConnectionError", "APITimeoutError"):
        return f"the service cannot be reached: {text}", False
    return f"{name}: {text}", False


class NoResend:
    """An HTTP transport that sends a training call once, where the server may carry it out twice.

    Where the SDK would send it again although it may have arrived, the SDK gets an answer after which it does not.

    Args:
        inner: sends; an ``httpx.AsyncBaseTransport``, as this is, without httpx being imported before it is needed.
        deduplicates: set once the server says that it recognises repeated requests.
    """

    def __init__(self, inner: Any, deduplicates: threading.Event) -> None:
        self._inner, self._deduplicates = inner, deduplicates

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer to ``request``."""
        import httpx

        path, known = request.url.path, self._deduplicates
        once = not known.is_set() and path.endswith(("/optim_step", "/forward_backward"))
        try:
            response: httpx.Response = await self._inner.handle_async_request(request)
            if once:
                await response.aread()  # the connection may break in the middle of it
        except Exception as error:
            if not once or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
                raise  # it never arrived
            why = f"the answer was lost ({type(error).__name__}: {error})"
        else:
            status = response.status_code
            if response.headers.get(_DEDUPLICATES) == "1":
                known.set()
            if path.endswith("/retrieve_future") and (status == 408 or status >= 500):
                await asyncio.sleep(_PAUSE)  # the SDK asks again at once
            if not once or known.is_set() or not _repeats_after(response):
                return response
            why = f"the service answered {status}: {response.text[:200]}"
        detail = f"{why}, and the call may have been carried out, so it is not sent again"
        return httpx.Response(_LOST, headers={"x-should-retry": "false"}, json={"detail": detail}, request=request)

    async def aclose(self) -> None:
        """Close its connections."""
        await self._inner.aclose()


def _repeats_after(response: httpx.Response) -> bool:
    """Return whether the SDK sends a request again after this answer."""
    status = response.status_code  # 429, too: a proxy may answer so for a request that it has passed on
    asks = response.headers.get("x-should-retry") == "true"
    return asks or status in (402, 408, 409, 429) or status >= 500 or (status == 400 and not response.content)


def forbid_resending(holder: InternalClientHolder) -> None:
    """Make all that an open client sends from now on go through ``NoResend``.

    Raises:
        UnsupportedError: the SDK has moved what this replaces.
    """
    import tinker
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

    lend, guarded, deduplicates = holder.aclient, weakref.WeakSet[Any](), threading.Event()

    @contextlib.contextmanager
    def aclient(kind: ClientConnectionPoolType) -> Iterator[Any]:
        """Lend an HTTP client of the SDK; each is guarded when it is lent first."""
        with lend(kind) as client:
            http = client._client  # noqa: SLF001  # the SDK has no other way to its transport
            if http not in guarded:
                guarded.add(http)
                http.follow_redirects = False  # to where a redirect leads, the key would go, too
                http._transport = NoResend(http._transport, deduplicates)  # noqa: SLF001
                mounts = http._mounts.items()  # noqa: SLF001  # of proxies
                http._mounts = {key: x and NoResend(x, deduplicates) for key, x in mounts}  # noqa: SLF001
            yield client

    async def ask() -> None:
        """Ask what says whether the server recognises repeated requests."""
        with aclient(ClientConnectionPoolType.SESSION) as client:
            await client.service.client_config(request=tinker.types.ClientConfigRequest(sdk_version=tinker.__version__))

    try:
        holder.aclient = aclient
        holder.run_coroutine_threadsafe(ask()).result()
    except AttributeError as error:
        raise UnsupportedError(f"rlkit needs tinker 0.38, or a later one with its connections: {error}") from error


class _HideKeys(logging.Filter):
    """Masks keys in what is logged, and remembers the SDK's last warning: (when, its text)."""

    warning: tuple[float, str] = (float("-inf"), "")

    def filter(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(TypeError, ValueError):  # a badly formatted record is for logging to complain of
            record.msg, record.args = redact(record.getMessage()), ()
            if record.levelno >= logging.WARNING and record.name.startswith("tinker"):
                self.warning = (time.monotonic(), record.msg)
        if record.exc_info:
            record.exc_text = redact("".join(traceback.format_exception(*record.exc_info))).rstrip()
        return True


_KEYS = _HideKeys()


def hide_key(key: str | None) -> None:
    """Mask ``key`` in rlkit's messages, and in what the SDK and its HTTP client log. May be called again."""
    add_secret(key)
    for name in [*logging.root.manager.loggerDict]:
        if name.partition(".")[0] in ("tinker", "httpx", "httpcore"):
            logging.getLogger(name).addFilter(_KEYS)  # which does nothing where the logger has it
