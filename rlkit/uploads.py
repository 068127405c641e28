"""Trajectories sent to OpenReward, where they can be looked at; a run neither waits for this nor fails with it."""

from __future__ import annotations

import http.client
import json
import logging
import math
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from rlkit import _check
from rlkit.errors import ConfigError, DataError
from rlkit.trajectory import Group, Trajectory

__all__ = ["OpenRewardUpload"]

_URL = "https://api.openreward.ai"
_EVENTS = 100  # in a request
_TYPES = {"user": "user_message", "assistant": "assistant_message", "system": "system_message", "tool": "tool_result"}

_log = logging.getLogger(__name__)


class OpenRewardUpload:
    """Uploads in a thread of its own, over a queue of limited length. A context manager.

    ``submit`` returns at once. What does not fit into the queue, and what can not be sent after some attempts, is left
    out and counted in ``metrics``; a warning is logged at the first time.

    Args:
        run: the run's name there.
        url: of the API; None: ``$OPENREWARD_API_URL``, else OpenReward's own.
        api_key: None: ``$OPENREWARD_API_KEY``. It is sent as a header to that address alone, redirects are not
            followed, and it is in no message, log or ``repr``.
        capacity: trajectories that may wait, >= 1.
        timeout: seconds for a request, > 0.
        attempts: requests for the same thing, >= 1, with pauses that double from half a second.

    Raises:
        ConfigError: an argument is not what it should be.
    """

    def __init__(
        self,
        run: str,
        *,
        url: str | None = None,
        api_key: str | None = None,
        capacity: int = 10_000,
        timeout: float = 10.0,
        attempts: int = 4,
    ) -> None:
        if not isinstance(run, str) or not run:
            raise ConfigError(_check.problem("run", f"got {_check.shown(run)}", "a name"))
        url = url or os.environ.get("OPENREWARD_API_URL") or _URL
        if not isinstance(url, str) or urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(_check.problem("url", f"got {_check.shown(url)}", "an http or https address"))
        api_key = api_key or os.environ.get("OPENREWARD_API_KEY") or ""
        if not isinstance(api_key, str) or not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key: is no printable text")
        self.run = run
        self._attempts = _check.integer("attempts", attempts, low=1)
        self._timeout = _check.real("timeout", timeout, above=0.0, why="seconds")
        self._waiting: queue.Queue[tuple[Group, Trajectory] | None] = queue.Queue(
            _check.integer("capacity", capacity, low=1)
        )
        self._request = _requests(url.rstrip("/") + "/v1/rollouts", api_key)
        self._closing = threading.Event()
        self._counts = {"sent": 0, "failed": 0, "dropped": 0}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="rlkit-upload", daemon=True)
        self._thread.start()

    @property
    def metrics(self) -> dict[str, float]:
        """Trajectories "upload/sent", "upload/failed" (could not be), "upload/dropped" (no room), "upload/waiting"."""
        with self._lock:
            counts = {f"upload/{name}": float(number) for name, number in self._counts.items()}
        return counts | {"upload/waiting": 0.0 if self._closing.is_set() else float(self._waiting.qsize())}

    def submit(self, groups: Iterable[Group] | Group) -> None:
        """Queues the trajectories of these groups; never waits.

        Raises:
            DataError: something else than groups.
        """
        groups = [groups] if isinstance(groups, Group) else list(groups)
        for i, group in enumerate(groups):
            if not isinstance(group, Group):
                raise DataError(_check.problem(f"groups[{i}]", f"got {_check.shown(group)}", "a Group"))
        for group in groups:
            for trajectory in group.trajectories:
                try:
                    if self._closing.is_set():
                        raise queue.Full
                    self._waiting.put_nowait((group, trajectory))
                except queue.Full:
                    self._count("dropped", "there was no room for it in the queue")

    def close(self, timeout: float = 10.0) -> None:
        """Sends what waits for up to ``timeout`` seconds, then gives it up."""
        _check.real("timeout", timeout, low=0.0, why="seconds")
        ends = time.monotonic() + timeout
        if not self._closing.is_set():
            while self._waiting.unfinished_tasks and self._thread.is_alive() and time.monotonic() < ends:
                time.sleep(0.01)
        self._closing.set()
        while True:
            try:
                self._waiting.get_nowait()
            except queue.Empty:
                break
            self._count("dropped", "the upload was closed")
        self._waiting.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenRewardUpload({self.run!r}, {self.metrics})"

    def __reduce__(self) -> Any:
        raise TypeError("an upload holds a key and a thread; it is not pickled")

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                for events in _requests_of(self.run, *item):
                    self._send(events)
                with self._lock:
                    self._counts["sent"] += 1
            except Exception as error:  # noqa: BLE001  # whatever it is, it is no reason to end a run
                self._count("failed", f"{type(error).__name__}: {error}")
            finally:
                self._waiting.task_done()

    def _send(self, events: list[dict[str, Any]]) -> None:
        pause = 0.5
        for attempt in range(1, self._attempts + 1):
            try:
                self._request({"events": events}, self._timeout)
            except urllib.error.HTTPError as error:
                error.close()
                if attempt == self._attempts or (error.code < 500 and error.code != 429):
                    raise
            except (OSError, http.client.HTTPException):
                if attempt == self._attempts:
                    raise
            else:
                return
            if self._closing.wait(pause):
                raise ConnectionError("closed before it could be sent again")
            pause *= 2

    def _count(self, name: str, why: str) -> None:
        with self._lock:
            self._counts[name] += 1
            first = self._counts[name] == 1
        if first:
            _log.warning("upload to OpenReward: a trajectory was left out (%s): %s", name, why)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another address."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """None: the answer is an error."""


def _requests(url: str, api_key: str) -> Any:
    """What posts a body; the key stays inside."""
    opener = urllib.request.build_opener(_NoRedirect)

    def post(body: Mapping[str, Any], timeout: float) -> None:
        data = json.dumps(body, default=repr).encode()
        headers = {"Content-Type": "application/json", "x-api-key": api_key, "User-Agent": "rlkit"}
        request = urllib.request.Request(url, data, headers, method="POST")  # noqa: S310  # http or https, checked
        with opener.open(request, timeout=timeout) as answer:
            answer.read(1 << 20)

    return post


def _requests_of(run: str, group: Group, trajectory: Trajectory) -> Iterator[list[dict[str, Any]]]:
    """The events of one trajectory, in the order in which they are to arrive."""
    name, now = str(uuid.uuid4()), int(time.time() * 1000)
    start = {
        "eventType": "rollout",
        "eventId": name,
        "timestamp": now,
        "runName": run,
        "rolloutName": f"{group.env}-{group.step}-{group.number}",
        "step": group.step,
        "environment": trajectory.env,
        "metadata": dict(trajectory.tags) | {"ended": trajectory.ended, "reward": _finite(trajectory.reward)},
    }
    yield [start]
    info: dict[str, Any] = {"current_step": group.step}
    if trajectory.index is not None:
        info["task_index"] = trajectory.index
    events = list(_messages(name, now, trajectory))
    if events:
        events[-1]["isFinished"] = True
    events.append({"eventType": "rollout_update", "eventId": name, "timestamp": now, "rollout_info": info})
    for i in range(0, len(events), _EVENTS):
        yield events[i : i + _EVENTS]


def _messages(rollout: str, now: int, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    rewards = iter([math.nan if turn.rewards == () else turn.reward for turn in trajectory.turns])  # NaN: none
    for index, message in enumerate(trajectory.messages):
        kind = _TYPES.get(str(message.get("role")), "user_message")
        content = message.get("content")
        body: dict[str, Any] = {"type": kind, "content": content if isinstance(content, str) else json.dumps(content)}
        if kind == "tool_result":
            body["callId"] = str(message.get("tool_call_id", ""))
        if kind == "assistant_message":
            body["reward"] = _finite(next(rewards, math.nan))
        head = {"eventType": "message", "eventId": str(uuid.uuid4()), "timestamp": now, "index": index}
        yield {k: v for k, v in (head | {"rolloutEventId": rollout} | body).items() if v is not None}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
