"""Futures: read in either style, abandoned without harm."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading

import anyio
import pytest

import rlkit
from rlkit import BackendTimeout, Future, RequestCancelled
from tests.each import for_each


@pytest.fixture
def pending():
    return concurrent.futures.Future()


async def wait(future):
    return await future


def test_of_is_done_and_what_was_not_made_drops_nothing(monkeypatch):
    """A future of a value gives it every time; wrong arguments raise Python's TypeError, and nothing is printed."""
    future, ignored = Future.of([1]), []
    assert future.done()
    assert future.result() is future.result(timeout=0)
    assert not future.cancel()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    for arguments in ((), (1, 2, 3, 4, 5, 6, 7)):
        with pytest.raises(TypeError, match="__init__"):
            Future(*arguments)
    gc.collect()
    assert not ignored


def test_result_times_out_and_can_be_read_later(pending):
    """A timeout is both a BackendTimeout and a TimeoutError, a finite number >= 0; the value comes all the same."""
    future = Future.wrap(pending, convert=lambda x: x + 1)
    with pytest.raises(BackendTimeout, match="again later"):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    for wrong in (-1, float("nan"), "1", True):
        with pytest.raises(rlkit.ConfigError, match="timeout"):
            future.result(wrong)
    pending.set_result(3)
    assert future.result() == asyncio.run(wait(future)) == 4  # converted where it is read


@for_each("error", [KeyError("theirs"), TimeoutError("in the work")])
def test_exception_passes_through(error):
    """The work's own exception is raised, unchanged, to every reader; on_error hears of each."""
    heard, pending = [], concurrent.futures.Future()
    future = Future.wrap(pending, on_error=heard.append)
    pending.set_exception(error)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            future.result(timeout=1)
        assert caught.value is error
    assert heard == [error, error]


def test_await(pending):
    """It wakes when a thread sets the result, several tasks may wait, and others run meanwhile: anyio's tasks, too."""
    others = concurrent.futures.Future()

    async def main():
        got = []

        async def one(future):
            got.append(await future)

        threading.Timer(0.02, pending.set_result, [7]).start()
        future = Future.wrap(pending)
        async with anyio.create_task_group() as group:
            for each in (future, future, Future.wrap(others)):
                group.start_soon(one, each)
            await anyio.sleep(0.001)
            others.set_result(1)
        return got

    assert anyio.run(main) == [1, 7, 7]


def test_cancelling_an_await_leaves_the_work(pending):
    """Cancelling, and asyncio.wait_for running out, never cancel what is under way, nor does its end disturb a loop."""

    async def main():
        task = asyncio.create_task(wait(Future.wrap(pending)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(Future.wrap(pending)), 0.01)
        asyncio.create_task(wait(Future.wrap(pending)))  # noqa: RUF006  # waits when the loop is closed
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not pending.cancelled()
    assert not Future.wrap(pending).cancel()  # a training call, which may not be lost
    pending.set_result(5)
    assert not Future.wrap(pending, on_cancel=lambda: None).cancel()  # it is done
    assert Future.wrap(pending).result() == 5


def test_cancel(pending):
    """Whoever works on it is told once, and all readers get the error, also those that wait, in tasks or threads."""
    told = []
    future = Future.wrap(pending, on_cancel=lambda: told.append(1))

    async def main():
        task = asyncio.create_task(wait(future))
        await asyncio.sleep(0)
        assert future.cancel()
        with pytest.raises(RequestCancelled, match="this request was cancelled"):
            await task

    asyncio.run(main())
    assert not future.cancel()
    assert told == [1]
    assert future.done()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    other = Future.wrap(concurrent.futures.Future(), on_cancel=lambda: None)
    threading.Timer(0.02, other.cancel).start()
    with pytest.raises(RequestCancelled):
        other.result()


def test_cancel_of_several(pending):
    """Each that can be is; the others are awaited, and the first cancelled one raises."""
    others = [concurrent.futures.Future() for _ in range(2)]
    futures = [Future.wrap(pending), *(Future.wrap(x, on_cancel=lambda: None) for x in others)]
    whole = Future.all(futures)
    assert whole.cancel()
    assert not whole.done()
    pending.set_result(1)
    with pytest.raises(RequestCancelled):
        whole.result()
    assert not whole.cancel()
    assert not Future.all([]).cancel()
