"""Environments on an OpenReward server: sessions over HTTP, in which the policy calls tools."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import os
import weakref
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import attrs

from rlkit import _check, _runtime
from rlkit.envs import calling
from rlkit.envs._adapters import function_schema, package
from rlkit.envs.protocol import Action, Message, StepResult, Tasks, TaskSettings, check_name
from rlkit.errors import ConfigError, EnvBusy, EnvError, RlkitError, UnknownNameError, UnsupportedError
from rlkit.tools import Malformed, error_message, formats, read_calls, tool_message

if TYPE_CHECKING:
    from openreward.api.environments.client import AsyncEnvironment, AsyncEnvironmentsAPI, AsyncSession
    from openreward.api.environments.types import TextBlock, ToolOutput

__all__ = ["openreward"]

_INSTALL = _runtime.command("openreward")
_BUSY = (429, 502, 503, 504)
_calling: contextvars.ContextVar[bool] = contextvars.ContextVar("_calling", default=False)


def openreward(
    name: str,
    *,
    base_url: str | None = None,
    variant: str | None = None,
    split: str = "train",
    api_key: str | None = None,
    secrets: Mapping[str, str | tuple[str, list[str]]] | None = None,
    toolset: str | None = None,
    env_overrides: Mapping[str, str] | None = None,
    format: str = "hermes",  # noqa: A002
    reminder: str | None = None,
    settings: TaskSettings | None = None,
    timeout: float = 60.0,
) -> Tasks:
    """Return the tasks of one split of an environment that an OpenReward server holds; ask it how many there are.

    The environment's tools are in ``env.tools``, for the prompt. A turn may call several; they are called in order, and
    what they give is what the policy is told, as messages of the role "tool". Their rewards are passed on one by one,
    so that an episode's is reduced over calls, not over turns; a call that gives None has no reward. A call that cannot
    be read, or whose arguments do not fit, is answered by what is wrong with it. A turn without a call is the last one:
    its text goes to the environment's terminal tool, if it has one.

    Args:
        name: "owner/name", or what a server of your own calls it.
        base_url: of a server of your own, such as "http://127.0.0.1:8080"; None: OpenReward's.
        variant: which environment, where the server holds several; None: its first.
        split: one of the environment's own.
        api_key: None: the variable OPENREWARD_API_KEY where ``base_url`` is None or the name has an owner; else none is
            sent.
        secrets: name -> value, or (value, hosts it may be sent to): what the environment's tools need. They are sent to
            the server, and are in no message, log or repr.
        toolset, env_overrides: as for the SDK's ``session``.
        format: how the policy writes calls, a name in ``rlkit.tools.formats``.
        reminder: the message to the policy after a turn without a call, where there is no terminal tool; then the
            episode goes on. None: it ends there, truncated.
        settings: what these tasks want to have different.
        timeout: seconds for what is asked of the server here.

    While episodes are played, a server without capacity (HTTP 429, 502, 503, 504, or out of reach, after the SDK's own
    attempts) raises ``EnvBusy``; a tool that raises there, or a session that is gone, ``EnvError``: the episode has
    failed, and is not the fault of the policy. A call of a tool whose answer is lost is not sent again, since the tool
    may have run: it raises ``EnvBusy``, too, and rollouts begin the episode again.

    Raises:
        UnknownNameError: no such split; the message lists them.
        ConfigError: an argument is not what it should be, there are no tasks, or openreward is not installed.
        EnvError: the server refused; EnvBusy: or has no capacity, or cannot be reached; EnvTimeout: no answer in time.
    """
    package("openreward", "openreward", _INSTALL)
    formats.resolve(format)
    check_name("name", name)
    check_name("split", split)
    for label, mapping in (("secrets", secrets), ("env_overrides", env_overrides)):
        if mapping is not None and not (isinstance(mapping, Mapping) and all(isinstance(k, str) for k in mapping)):
            raise ConfigError(label, f"is a {type(mapping).__name__}", "a mapping from names")
    _check_secrets(secrets or {})
    if "/" in name:
        api_key = api_key or os.environ.get("OPENREWARD_API_KEY")
        if not api_key:
            hint = "" if base_url is None else ", or give the name without its owner"
            raise ConfigError(f"rlkit.envs.openreward: {name!r} needs an API key; set OPENREWARD_API_KEY{hint}")
    place = _Place(name, variant, base_url, api_key)
    timeout = _check.real("timeout", timeout, above=0.0)
    size = calling.wait(_size, place, split, timeout=timeout, where=place.where)
    options = {"secrets": secrets, "toolset": toolset, "env_overrides": env_overrides}
    make = functools.partial(_Env, place, split, options, format, reminder)
    label = name if variant is None else f"{name}/{variant}"
    return Tasks(make, size, name=label, split=split, settings=settings)


def _check_secrets(secrets: Mapping[str, object]) -> None:
    """Raise ConfigError for a secret of which neither we nor the SDK know where it may be sent."""
    known = package("openreward", "openreward.api.sandboxes.secrets", _INSTALL).WELL_KNOWN_SECRETS
    for key, value in secrets.items():
        if isinstance(value, str) and key not in known:
            text = "the hosts that may receive it are unknown; expected (value, hosts), or one of"
            raise ConfigError(f"secrets[{key!r}]: {text}: {', '.join(known)}")


@attrs.frozen
class _Place:
    """Where an environment is to be found."""

    name: str
    variant: str | None
    base_url: str | None
    api_key: str | None = attrs.field(repr=False)

    @property
    def where(self) -> str:
        return f"rlkit.envs.openreward: {self.name!r}" + (f" at {self.base_url}" if self.base_url else "")

    def environment(self) -> AsyncEnvironment:
        """Return the SDK's object for the running event loop; environments of one loop share their connections."""
        clients = _clients.setdefault(asyncio.get_running_loop(), {})
        key = (self.base_url, self.api_key)
        if key not in clients:
            clients[key] = _client(self.base_url, self.api_key)
        return clients[key].get(self.name, variant=self.variant, base_url=self.base_url)


_Clients: TypeAlias = "dict[tuple[str | None, str | None], AsyncEnvironmentsAPI]"
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Clients] = weakref.WeakKeyDictionary()


def _client(base_url: str | None, api_key: str | None) -> AsyncEnvironmentsAPI:
    sdk = package("openreward", "openreward", _INSTALL)
    _call_once()
    if base_url is not None:
        return sdk.AsyncEnvironmentsAPI(base_url=base_url, api_key=api_key)
    os.environ.setdefault("OPENREWARD_DISABLE_UPDATE_CHECK", "1")
    return sdk.AsyncOpenReward(api_key=api_key).environments


@functools.cache
def _call_once() -> None:
    """Make the SDK repeat a tool call of rlkit's only if it resumes the first one.

    After a 429 or a lost connection it would send the call anew, although the tool may have run: a step twice.
    """
    module = package("openreward", "openreward.api.environments.client", _INSTALL)
    send = getattr(module, "resumable_sse", None)
    if send is None:
        raise UnsupportedError("rlkit.envs.openreward needs openreward 0.1.167, or a later one with resumable_sse")

    def once(*args: object, **options: object) -> object:
        if _calling.get():
            options["resumable_only"] = True
        return send(*args, **options)

    module.resumable_sse = once  # type: ignore[attr-defined]  # the SDK looks it up there


@atexit.register
def _close() -> None:
    """Close connections before the program ends, or aiohttp complains."""
    for loop, clients in list(_clients.items()):
        for client in clients.values():
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(client.aclose(), loop).result(2.0)


async def _size(place: _Place, split: str) -> int:
    """Return how many tasks the split has."""
    with _convert_errors(place.where):
        environment = place.environment()
        splits = await environment.list_splits()
        if split not in splits:
            raise UnknownNameError(f"{place.where}: no split named {split!r}. There are: {', '.join(splits) or 'none'}")
        size = int(await environment.num_tasks(split))
    if size < 1:
        raise ConfigError(f"{place.where}: split {split!r}", "has no tasks", "at least one")
    return size


@attrs.define(eq=False, repr=False)
class _Env:
    """One session."""

    _place: _Place
    _split: str
    _options: Mapping[str, object]
    _form: str
    _reminder: str | None
    _index: int
    _session: AsyncSession = attrs.field(default=None, init=False)  # before reset, and after close
    _opening: asyncio.Future[AsyncSession] | None = attrs.field(default=None, init=False)
    tools: list[dict[str, object]] = attrs.field(factory=list, init=False)

    async def reset(self, seed: int) -> list[Message]:  # noqa: ARG002  # the index says which task it is
        with _convert_errors(self._place.where):
            environment = self._place.environment()
            self._session = environment.session(split=self._split, index=self._index, **self._options)
            # A cancelled request may reach the server all the same, which then keeps a session that no one can name.
            self._opening = asyncio.ensure_future(self._session.__aenter__())
            await asyncio.shield(self._opening)
            messages = await self._session.get_messages()
            self.tools = [
                function_schema(tool.name, tool.description, tool.input_schema)
                for tool in await self._session.list_tools()
            ]
        return [{"role": message.role, "content": _text(message.blocks)} for message in messages]

    async def step(self, action: Action) -> StepResult:
        parsed = read_calls(action, self._form, self.tools)
        if not parsed.in_order:
            return await self._plain(action.content)
        messages, rewards, metadata, finished = [], [], [], False
        for call in parsed.in_order:
            if isinstance(call, Malformed):
                messages.append(error_message(call))
                continue
            try:
                output = await self._call_tool(self._session.call_tool(call.name, dict(call.arguments)))
            except _CallRefused as refused:
                messages.append(error_message(Malformed(str(refused), "another call", name=call.name, id=call.id)))
                continue
            messages.append(tool_message(call, _text(output.blocks)))
            rewards.append(output.reward)
            metadata.append(dict(output.metadata or {}))
            if output.finished:
                finished = True
                break
        info = {"tool_calls": len(rewards), "malformed_calls": len(messages) - len(rewards), "metadata": metadata}
        return StepResult(messages, terminated=finished, info=info, rewards=rewards)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                if self._opening is not None and not self._opening.done():
                    await asyncio.wait([self._opening])
            finally:
                if self._opening is not None:
                    self._opening.cancel()
                await session.__aexit__(None, None, None)

    async def _plain(self, text: str) -> StepResult:
        """Take a turn without calls: an answer where the environment takes one, else nothing that leads on."""
        with _convert_errors(self._place.where):
            answers = await self._session.is_assistant_message_final()
        if answers:
            output = await self._call_tool(self._session.call_terminal_tool(text))
            info = {"metadata": [dict(output.metadata or {})]}
            return StepResult(_text(output.blocks), output.reward, terminated=True, info=info)
        if self._reminder is None:
            return StepResult(reward=None, truncated=True, info={"reason": "no tool was called"})
        return StepResult(self._reminder, reward=None)

    async def _call_tool(self, call: Awaitable[ToolOutput]) -> ToolOutput:
        errors = package("openreward", "openreward.api.errors", _INSTALL)
        with _convert_errors(self._place.where):
            token = _calling.set(True)
            try:
                return await call
            except errors.ToolCallError as error:
                raise _CallRefused(error.detail) from error
            finally:
                _calling.reset(token)


class _CallRefused(Exception):
    """The server did not make a call, for reasons that the policy is to be told."""


@contextlib.contextmanager
def _convert_errors(where: str) -> Iterator[None]:
    """Raise the SDK's errors as EnvBusy where the same call may succeed later, and else as EnvError."""
    import aiohttp

    errors = package("openreward", "openreward.api.errors", _INSTALL)
    http = package("openreward", "openreward.api._session.http", _INSTALL)
    try:
        yield
    except RlkitError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # what the SDK makes of garbage
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise EnvError(f"{where}: the server's answer cannot be read ({text}); is it an OpenReward server?") from error
    except (errors.OpenRewardError, http.AuthenticationError, aiohttp.ClientError, OSError, TimeoutError) as error:
        causes = [error, *getattr(error, "errors", ())]
        statuses = [cause.status for cause in causes if isinstance(cause, aiohttp.ClientResponseError)]
        gone = isinstance(error, (errors.ToolFailed, errors.SessionTerminatedError, http.AuthenticationError))
        busy = any(status in _BUSY for status in statuses) if statuses else not gone
        told = causes[-1]  # of several attempts the last one's failure
        text = " ".join(str(told).split())
        text = "the API key is missing or not valid" if isinstance(error, http.AuthenticationError) else text
        kind = EnvBusy if busy else EnvError
        raise kind(f"{where}: {type(told).__name__}: {text}") from error


def _text(blocks: Iterable[TextBlock]) -> str:
    """Return the text of content blocks."""
    for block in blocks:
        if block.type != "text":
            raise EnvError("openreward", f"got a block of type {block.type!r}", "text blocks")
    return "\n".join(block.text for block in blocks)
