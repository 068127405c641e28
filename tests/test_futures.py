"""Futures: read in either style, abandoned without harm."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import anyio
import pytest

import rlkit
from rlkit import BackendTimeout, Future, RequestCancelled


@pytest.fixture
def pending():
    return concurrent.futures.Future()


def test_of_is_done():
    """A future of a value is done, and gives it every time."""
    future = Future.of([1])
    assert future.done()
    assert future.result() is future.result(timeout=0)


def test_result_times_out_and_can_be_read_later(pending):
    """A timeout is both a BackendTimeout and a TimeoutError, and the value comes all the same."""
    future = Future.wrap(pending)
    with pytest.raises(BackendTimeout, match="again later"):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    pending.set_result(3)
    assert future.result() == 3


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_bad_timeouts(pending, timeout):
    """A timeout is a finite number of seconds >= 0."""
    with pytest.raises(rlkit.ConfigError, match="timeout"):
        Future.wrap(pending).result(timeout)


def test_exception_passes_through(pending):
    """The work's own exception is raised, unchanged, to every reader; on_error hears of each."""
    heard = []
    future = Future.wrap(pending, on_error=heard.append)
    error = KeyError("theirs")
    pending.set_exception(error)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            future.result()
        assert caught.value is error
    assert heard == [error, error]


def test_work_that_raises_a_timeout_is_not_a_pending_one(pending):
    """A TimeoutError of the work itself is the work's."""
    error = TimeoutError("in the work")
    pending.set_exception(error)
    with pytest.raises(TimeoutError) as caught:
        Future.wrap(pending).result(timeout=1)
    assert caught.value is error


def test_convert(pending):
    """convert is applied where the value is read."""
    future = Future.wrap(pending, convert=lambda x: x + 1)
    pending.set_result(1)
    assert future.result() == 2
    assert asyncio.run(wait(future)) == 2


async def wait(future):
    return await future


def test_await_from_a_thread(pending):
    """An await wakes when another thread sets the result; several tasks may await one future."""

    async def main():
        threading.Timer(0.02, pending.set_result, [7]).start()
        future = Future.wrap(pending)
        return await asyncio.gather(wait(future), wait(future))

    assert asyncio.run(main()) == [7, 7]


def test_await_works_under_anyio(pending):
    """anyio on asyncio awaits it too, in a task group."""

    async def main():
        got = []

        async def one():
            got.append(await Future.wrap(pending))

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            await anyio.sleep(0.01)
            pending.set_result(1)
        return got

    assert anyio.run(main) == [1]


def test_cancelling_an_await_leaves_the_work(pending):
    """Cancelling, and asyncio.wait_for running out, never cancel what is under way."""

    async def main():
        task = asyncio.create_task(wait(Future.wrap(pending)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(Future.wrap(pending)), 0.01)

    asyncio.run(main())
    assert not pending.cancelled()
    pending.set_result(5)
    assert Future.wrap(pending).result() == 5


def test_result_set_after_the_loop_is_closed(pending):
    """A loop that ended while its task waited is not disturbed by the result."""

    async def main():
        task = asyncio.create_task(wait(Future.wrap(pending)))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    pending.set_result(1)


def test_training_calls_are_not_cancelled(pending):
    """What is under way and may not be lost is not cancelled, nor is what is done."""
    assert not Future.wrap(pending).cancel()
    assert not Future.of(1).cancel()
    pending.set_result(5)
    assert not Future.wrap(pending, on_cancel=lambda: None).cancel()
    assert Future.wrap(pending).result() == 5


def test_cancel(pending):
    """Whoever works on it is told once, and all readers get the error, also those that wait."""
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


def test_cancel_wakes_a_waiting_thread(pending):
    """Which waits without a limit."""
    future = Future.wrap(pending, on_cancel=lambda: None)
    threading.Timer(0.02, future.cancel).start()
    with pytest.raises(RequestCancelled):
        future.result()


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


def test_repr(pending):
    """A future says whether it is done, and with what."""
    assert repr(Future.wrap(pending)) == "Future(pending)"
    assert repr(Future.of(1)) == "Future(1)"
    pending.set_exception(ValueError("x"))
    assert "ValueError" in repr(Future.wrap(pending))


def test_await_does_not_block_the_loop(pending):
    """Other tasks run while one waits: the result comes from one of them."""

    async def main():
        async def work():
            for _ in range(6):
                await asyncio.sleep(0.001)
            pending.set_result(7)

        working = asyncio.create_task(work())
        assert await Future.wrap(pending) == 7
        await working

    asyncio.run(main())
