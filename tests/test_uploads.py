"""Uploading never blocks or fails a run, and keeps its key to itself."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import attrs
import pytest

import rlkit
from rlkit import ConfigError, DataError, Sample
from rlkit.trajectory import Group, Trajectory, Turn
from rlkit.uploads import OpenRewardUpload
from tests.each import for_each

KEY = "canary-7f3a"


def group():
    turns = [Turn(Sample([1], [2], [-1.0]), 0.25), Turn(Sample([1, 2, 3], [4], [-1.0]), float("nan"))]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1? żółć"},
        {"role": "assistant", "content": "3"},
        {"role": "tool", "content": [{"type": "text", "text": "no"}], "tool_call_id": "c1"},
        {"role": "assistant", "content": "2"},
    ]
    return Group([Trajectory(turns, env="sum", index=4, ended="terminated", tags={"a": 1}, messages=messages)], step=7)


@pytest.fixture
def server():
    """A loopback server that keeps what it is sent and answers what ``statuses`` says, 200 in the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.seen.append((self.path, self.headers["x-api-key"], json.loads(body)))
            self.server.gate.wait(30)
            status = self.server.statuses.pop(0) if self.server.statuses else 200
            self.send_response(status)
            if status == 307:
                self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.seen, server.statuses, server.gate = [], [], threading.Event()
    server.gate.set()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    server.server_close()
    thread.join()


def uploaded(server, *groups, **options):
    """The closed upload of these groups."""
    with OpenRewardUpload("run", **{"url": server.url, "api_key": KEY, **options}) as upload:
        upload.submit(groups)
    return upload


def test_what_is_sent(server, monkeypatch):
    """A rollout, its messages in order with the turns' rewards, and an update."""
    monkeypatch.setenv("OPENREWARD_API_URL", server.url)
    monkeypatch.setenv("OPENREWARD_API_KEY", KEY)
    upload = uploaded(server, group(), url=None, api_key=None)
    assert upload.metrics == {"upload/sent": 1, "upload/failed": 0, "upload/dropped": 0, "upload/waiting": 0}
    (path, key, first), (_, _, second) = server.seen
    assert (path, key) == ("/v1/rollouts", KEY)
    (start,) = first["events"]
    sent = [start[name] for name in ("eventType", "runName", "environment", "step")]
    assert sent == ["rollout", "run", "sum", 7]
    *messages, update = second["events"]
    assert [(m["eventType"], m["type"], m["index"], m.get("reward")) for m in messages] == [
        ("message", "system_message", 0, None),
        ("message", "user_message", 1, None),
        ("message", "assistant_message", 2, 0.25),
        ("message", "tool_result", 3, None),
        ("message", "assistant_message", 4, None),
    ]
    assert messages[1]["content"] == "1 + 1? żółć"
    assert messages[3]["callId"] == "c1"
    assert messages[4]["isFinished"]
    assert {m["rolloutEventId"] for m in messages} == {start["eventId"]} == {update["eventId"]}
    assert (update["eventType"], update["rollout_info"]) == ("rollout_update", {"task_index": 4, "current_step": 7})


def test_a_turn_without_a_reward_is_sent_without(server):
    (trajectory,) = group().trajectories
    turns = [attrs.evolve(trajectory.turns[0], reward=0.0, rewards=()), *trajectory.turns[1:]]
    uploaded(server, attrs.evolve(group(), trajectories=[attrs.evolve(trajectory, turns=turns)]))
    said = [m for m in server.seen[1][2]["events"] if m.get("type") == "assistant_message"]
    assert "reward" not in said[0]


@for_each(
    ("statuses", "sent", "requests"),  # an answer that may change is asked for again; a redirect is not followed
    [([500, 429], 1, 4), ([307], 0, 1)],
)
def test_answers_of_the_server(server, statuses, sent, requests):
    server.seen, server.statuses = [], list(statuses)
    upload = uploaded(server, group())
    assert (upload.metrics["upload/sent"], upload.metrics["upload/failed"]) == (sent, 1 - sent)
    assert [path for path, *_ in server.seen] == ["/v1/rollouts"] * requests


def test_failures_are_counted_and_logged_once(server, caplog):
    server.statuses = [401, 401]
    upload = uploaded(server, group(), group(), group())
    assert (upload.metrics["upload/failed"], upload.metrics["upload/sent"]) == (2, 1)
    (record,) = caplog.records
    assert record.message.startswith("tracker OpenRewardUpload failed: HTTPError: HTTP Error 401: Unauthorized;")


def test_a_server_that_hangs_holds_up_nothing(server):
    """submit returns, what does not fit is dropped, and close gives up."""
    server.gate.clear()
    upload = OpenRewardUpload("run", url=server.url, capacity=2)
    for _ in range(50):
        upload.submit(group())
    assert upload.metrics["upload/dropped"] >= 47
    upload.close(timeout=0.1)
    assert upload.metrics["upload/sent"] == 0
    upload.submit(group())
    assert upload.metrics["upload/dropped"] + 1 >= 50


def test_a_run_uploads_its_trajectories(server, tmp_path):
    """It is a tracker: a run's trajectories are sent, its numbers are not, and closing the run sends what waits."""
    upload = OpenRewardUpload("run", url=server.url, api_key=KEY)
    with rlkit.Run(tmp_path, trackers=[upload], seed=0) as run:
        run.log({"train/loss": 0.5})
        run.log_trajectories([group()])
    assert upload.metrics["upload/sent"] == 1
    assert [event["eventType"] for _, _, body in server.seen for event in body["events"]][:2] == ["rollout", "message"]


def test_no_server(server):
    assert uploaded(server, group(), url="http://127.0.0.1:1", attempts=1).metrics["upload/failed"] == 1


def test_the_key_is_nowhere(server, caplog):
    caplog.set_level(logging.DEBUG)
    server.statuses = [400]
    upload = uploaded(server, group())
    assert KEY not in repr(upload) + caplog.text + repr(vars(upload))
    with pytest.raises(TypeError, match="cannot be pickled") as caught:
        pickle.dumps(upload)
    assert KEY not in str(caught.value)


@for_each(
    ("name", "value"),
    [
        *(("run", ""), ("run", 3), ("url", "file:///etc/passwd"), ("url", 3)),
        *(("api_key", "a\nb"), ("capacity", 0), ("timeout", 0), ("attempts", 0)),
    ],
)
def test_bad_arguments(name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        OpenRewardUpload(**{"run": "r", name: value})
    assert "a\nb" not in str(caught.value)


def test_only_groups(server):
    with pytest.raises(DataError, match=r"groups\[0\]"):
        uploaded(server, 3)
