"""Upload trajectories to OpenReward for viewing; a run neither waits for an upload nor fails with it."""

from __future__ import annotations

import functools
import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

from rlkit import _check
from rlkit._runtime import Resource
from rlkit.errors import ConfigError
from rlkit.tracking import BackgroundCalls
from rlkit.trajectory import Group, Trajectory, checked_groups

__all__ = ["OpenRewardUpload"]

_URL = "https://api.openreward.ai"
_EVENTS = 100  # in a request
_TYPES = {"user": "user_message", "assistant": "assistant_message", "system": "system_message", "tool": "tool_result"}

_Event: TypeAlias = dict[str, object]
_Post: TypeAlias = Callable[[Mapping[str, object], float], None]


class OpenRewardUpload(Resource):
    """An uploader with its own thread and a queue of limited length. A tracker and a context manager.

    ``submit`` returns at once. Trajectories that do not fit into the queue, or cannot be sent after some attempts, are
    left out and counted in ``metrics``; a warning is logged the first time. ``Run(trackers=[...])`` takes it too: it
    uploads a run's trajectories, not its numbers.

    Args:
        run: the run's name there.
        url: of the API; None: ``$OPENREWARD_API_URL``, else OpenReward's own.
        api_key: None: ``$OPENREWARD_API_KEY``. It is sent as a header to that address alone, redirects are not
            followed, and it does not appear in messages, logs or ``repr``.
        capacity: trajectories that may wait, >= 1.
        timeout: seconds for a request, > 0.
        attempts: requests for the same thing, >= 1, with pauses that double from half a second.

    Raises:
        ConfigError: an argument is not valid.
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
        _check.require(isinstance(run, str) and run, "run", run, "a name")
        url = url or os.environ.get("OPENREWARD_API_URL") or _URL
        if not isinstance(url, str) or urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError("url", f"got {_check.describe(url)}", "an http or https address")
        api_key = api_key or os.environ.get("OPENREWARD_API_KEY") or ""
        if not isinstance(api_key, str) or not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key: is not printable text")
        self.run = run
        attempts = _check.integer("attempts", attempts, low=1)
        timeout = _check.real("timeout", timeout, above=0.0, why="seconds")
        client = _Client(_requests(url.rstrip("/") + "/v1/rollouts", api_key), timeout, attempts)
        self._delivery = BackgroundCalls(client, type(self).__name__, _check.integer("capacity", capacity, low=1))

    @property
    def metrics(self) -> dict[str, float]:
        """Trajectories "upload/sent", "upload/failed" (gave an error), "upload/dropped" (no room), "upload/waiting"."""
        counts = {"sent": self._delivery.receiver.sent, "waiting": self._delivery.waiting}
        counts |= {name: self._delivery.counts[name] for name in ("failed", "dropped")}
        return {f"upload/{name}": float(number) for name, number in counts.items()}

    def submit(self, groups: Iterable[Group] | Group) -> None:
        """Queue the trajectories of these groups; never wait.

        Raises:
            DataError: an object that is not a group.
        """
        for group in checked_groups(groups):
            for trajectory in group.trajectories:
                self._delivery.submit(functools.partial(_Client.send, run=self.run, group=group, trajectory=trajectory))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Do nothing: numbers are not uploaded."""

    def log_trajectories(self, groups: Iterable[Group], step: int, **_: Sequence[object] | None) -> None:  # noqa: ARG002
        """Queue the trajectories, as ``submit`` does."""
        self.submit(groups)

    def close(self, timeout: float = 10.0) -> None:
        """Send waiting trajectories for up to ``timeout`` seconds, then drop the rest."""
        deadline = time.monotonic() + _check.real("timeout", timeout, low=0.0, why="seconds")
        self._delivery.end()
        self._delivery.wait(deadline)
        self._delivery.receiver.closing.set()

    def __repr__(self) -> str:
        return f"OpenRewardUpload({self.run!r}, {self.metrics})"


@attrs.define(eq=False, repr=False)
class _Client:
    """A client that sends one trajectory after the other, and retries failed requests."""

    _post: _Post
    _timeout: float
    _attempts: int
    sent: int = 0
    closing: threading.Event = attrs.field(factory=threading.Event)

    def send(self, run: str, group: Group, trajectory: Trajectory) -> None:
        for events in _requests_of(run, group, trajectory):
            self._send(events)
        self.sent += 1

    def close(self) -> None:
        """Do nothing: the client holds no resources."""

    def _send(self, events: list[_Event]) -> None:
        pause = 0.5
        for attempt in range(1, self._attempts + 1):
            try:
                return self._post({"events": events}, self._timeout)
            except (OSError, http.client.HTTPException) as error:
                final = False
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                    final = error.code < 500 and error.code != 429
                if final or attempt == self._attempts:
                    raise
            if self.closing.wait(pause):
                raise ConnectionError("closed before it could be sent again")
            pause *= 2
        return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that refuses redirects, which would send the key to another address."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Return None, so that the answer is an error."""


def _requests(url: str, api_key: str) -> _Post:
    """Make the function that posts a body; the key stays inside of it."""
    opener = urllib.request.build_opener(_NoRedirect)

    def post(body: Mapping[str, object], timeout: float) -> None:
        data = json.dumps(body, default=repr).encode()
        headers = {"Content-Type": "application/json", "x-api-key": api_key, "User-Agent": "rlkit"}
        request = urllib.request.Request(url, data, headers, method="POST")  # noqa: S310  # http or https, checked
        with opener.open(request, timeout=timeout) as answer:
            answer.read(1 << 20)

    return post


def _requests_of(run: str, group: Group, trajectory: Trajectory) -> Iterator[list[_Event]]:
    """Yield the events of one trajectory, request by request, in the order in which they are to arrive."""
    name, now = str(uuid.uuid4()), int(time.time() * 1000)
    start: _Event = {
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
    info: _Event = {"current_step": group.step}
    if trajectory.index is not None:
        info["task_index"] = trajectory.index
    events = list(_messages(name, now, trajectory))
    if events:
        events[-1]["isFinished"] = True
    events.append({"eventType": "rollout_update", "eventId": name, "timestamp": now, "rollout_info": info})
    for i in range(0, len(events), _EVENTS):
        yield events[i : i + _EVENTS]


def _messages(rollout: str, now: int, trajectory: Trajectory) -> Iterator[_Event]:
    rewards = iter([math.nan if turn.rewards == () else turn.reward for turn in trajectory.turns])  # NaN: none
    for index, message in enumerate(trajectory.messages):
        kind = _TYPES.get(str(message.get("role")), "user_message")
        content = message.get("content")
        body: _Event = {"type": kind, "content": content if isinstance(content, str) else json.dumps(content)}
        if kind == "tool_result":
            body["callId"] = str(message.get("tool_call_id", ""))
        if kind == "assistant_message":
            body["reward"] = _finite(next(rewards, math.nan))
        head: _Event = {"eventType": "message", "eventId": str(uuid.uuid4()), "timestamp": now, "index": index}
        yield {k: v for k, v in (head | {"rolloutEventId": rollout} | body).items() if v is not None}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
