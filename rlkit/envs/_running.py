"""Calls that have begun, and whether anybody still waits for them."""

from __future__ import annotations

import concurrent.futures
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import cast

from rlkit.envs import _home
from rlkit.errors import EnvError, EnvTimeout
from rlkit.futures import settled

__all__ = ["Running", "abandoned"]


class Running:
    """A call that has begun. ``outcome`` is settled when it has really ended, even if nobody waits any more."""

    def __init__(
        self,
        where: str,
        fn: Callable[..., object],
        args: tuple[object, ...],
        home: _home.Home | _home.Lodging,
        *,
        convert: Callable[[object], object] | None = None,
    ) -> None:
        self.where = where
        self._convert = convert  # applied where the call ran, since a large answer takes time to check
        self.outcome: concurrent.futures.Future[object] = concurrent.futures.Future()
        self._home = home
        self._cancel: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._given_up = False
        if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004
            self._await(cast("Callable[[], Awaitable[object]]", functools.partial(fn, *args)))
        else:
            run = home.run if isinstance(home, _home.Lodging) else contextvars.copy_context().run
            _home.threads.start(lambda: self._run(run, fn, args))

    def _run(self, run: Callable[..., object], fn: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            value = run(fn, *args)
            if inspect.isawaitable(value):
                run(self._await, lambda: value)
                return
            value = value if self._convert is None else self._convert(value)
        except BaseException as error:  # noqa: BLE001  # sys.exit in an environment ends its episode alone
            self.outcome.set_exception(self._tamed(error))
        else:
            self.outcome.set_result(value)

    def _await(self, make: Callable[[], Awaitable[object]]) -> None:
        async def awaited() -> None:
            try:
                value = await make()
                value = value if self._convert is None else self._convert(value)
            except BaseException as error:  # noqa: BLE001  # one that left the coroutine would end the event loop
                self.outcome.set_exception(self._tamed(error))
            else:
                self.outcome.set_result(value)

        def ended() -> None:
            if not self.outcome.done():
                self.outcome.set_exception(EnvError(f"{self.where}: given up before it began"))

        with self._lock:
            if self._given_up:
                ended()
            else:
                self._cancel = self._home.begin(awaited, ended)

    def _tamed(self, error: BaseException) -> Exception:
        """Exceptions as they are; what would end a program, a task or a loop, as an EnvError."""
        if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
            return error
        tamed = EnvError(f"{self.where}: raised {type(error).__name__}{error.args}; expected an answer")
        tamed.__cause__ = error
        return tamed

    def give_up(self) -> None:
        """Nobody waits any more: a coroutine is cancelled, a thread can only be left alone."""
        with self._lock:
            self._given_up = True
            cancel = self._cancel
        if cancel is not None:
            cancel()
        _Abandoned.add(self.outcome)

    async def result(self, timeout: float | None) -> object:
        """Return what the call gave."""
        try:
            in_time = await settled(self.outcome, timeout)
        except BaseException:
            self.give_up()
            raise
        if not in_time:
            self.give_up()
            raise EnvTimeout(f"{self.where}: no answer within {timeout:g} s")
        return self.outcome.result()


class _Abandoned:
    """Counts the calls that nobody waits for and that have not ended."""

    lock = threading.Lock()
    count = 0

    @classmethod
    def add(cls, outcome: concurrent.futures.Future[object]) -> None:
        with cls.lock:
            cls.count += 1
        outcome.add_done_callback(cls.ended)  # at once, if it has ended meanwhile

    @classmethod
    def ended(cls, _: object) -> None:
        with cls.lock:
            cls.count -= 1


def abandoned() -> int:
    """How many calls into environments were given up and still run; each holds a thread if it is not ``async``."""
    return _Abandoned.count
