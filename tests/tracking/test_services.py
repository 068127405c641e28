"""The trackers that hand on to other packages, each read back with that package's own reader, offline.

``pytest tests/tracking/test_services.py -k wandb`` (or tensorboard, trackio, mlflow), in an environment that has rlkit,
pytest and that package, runs all that concerns it, without a network; tensorboard needs tensorboardX and tensorboard.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import socket
import sqlite3
import time

import pytest

from rlkit import ConfigError, DataError, Sample, _runtime
from rlkit.runs import Run
from rlkit.tracking import MultiTracker, for_run, registry
from rlkit.trajectory import Group, Trajectory, Turn

CANARY = "canary-5d2e9b7af31c"
CONFIG = {"lr": 1e-4, "api_key": CANARY, "nested": {"password": CANARY, "url": f"https://x?k={CANARY}"}}
MESSAGES = [{"role": "user", "content": f"hi {CANARY}"}]
GROUP = Group([Trajectory([Turn(Sample([65], [66], [-0.5]), 1.0)], messages=MESSAGES)])
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio", "mlflow": "mlflow"}
each_service = pytest.mark.parametrize("name", PACKAGES)

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),  # MLflow's, of SQLAlchemy
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """A key that must not leave, places for each service's files, and no way to any other machine."""
    monkeypatch.setenv("SOME_API_KEY", CANARY)
    for name, value in {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    connect = socket.socket.connect

    def local(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a connection to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)
    if importlib.util.find_spec("trackio") is not None:
        from trackio import sqlite_storage, utils

        for module in (utils, sqlite_storage):  # read at import, which another test may have done
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path, raising=False)


def make(name, folder, **options):
    pytest.importorskip(PACKAGES[name])
    return registry[name](**({"folder": folder} if name in ("tensorboard", "wandb") else {}), **options)


def records_of(data):
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB; checksum, length, kind) after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def read_wandb(folder):
    """Every run below, once wandb's own process has written it to its end."""
    history, texts = [], [path.read_text() for path in folder.rglob("*.table.json")]
    for file in folder.rglob("*.wandb"):
        for _ in range(600):  # a moment after the run is finished
            records = list(records_of(file.read_bytes()))
            if any(record.HasField("exit") for record in records):
                break
            time.sleep(0.05)
        history += [
            {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        texts += [str(record.run.config) for record in records if record.HasField("run")]
    return {(int(row["step"]), float(row["train/loss"])) for row in history if "train/loss" in row}, "".join(texts)


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = {path.parent for path in folder.rglob("events*")}
    read = EventAccumulator(str(place)).Reload()
    texts = [read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]]
    return {(e.step, e.value) for e in read.Scalars("train/loss")}, "".join(texts)


def read_trackio(folder):
    (database,) = folder.glob("*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
        texts = [str(connection.execute("select * from configs").fetchall()), str(rows)]
    metrics = [(step, json.loads(text)) for step, text in rows]
    return {(step, each["train/loss"]) for step, each in metrics if "train/loss" in each}, "".join(texts)


def read_mlflow(folder):
    import mlflow

    client = mlflow.MlflowClient()
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert {run.info.status for run in runs} == {"FINISHED"}
    texts = [str(run.data.params) for run in runs]
    texts += [path.read_text() for path in folder.rglob("artifacts/trajectories/*.json")]
    found = [client.get_metric_history(run.info.run_id, "train/loss") for run in runs]
    return {(m.step, m.value) for history in found for m in history}, "".join(texts)


def read_service(name, folder):
    """{(step, train/loss)} and all texts as the package itself reads them; the key is in no file."""
    assert [x for x in folder.rglob("*") if x.is_file() and CANARY.encode() in x.read_bytes()] == []
    return globals()[f"read_{name}"](folder)


@each_service
def test_a_missing_package_names_the_extra(monkeypatch, tmp_path, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(_runtime.command(name))):
        registry[name](str(tmp_path))


@each_service
def test_what_is_logged_arrives(tmp_path, name):
    tracker = make(name, tmp_path, config=CONFIG)
    with MultiTracker([tracker], timeout=120.0) as multi:
        multi.log({"train/loss": 0.5, "train/nan": math.nan, "train/inf": math.inf}, 3)
        multi.log_trajectories([GROUP], 3)
        multi.log({"train/loss": 0.25}, 1)  # a run that was resumed from an earlier step
    assert multi.metrics == {}
    losses, texts = read_service(name, tmp_path)
    assert losses == {(3, 0.5), (1, 0.25)}
    for text in ("0.0001", "api_key", "https://x?k=***", "hi ***"):
        assert text in texts


@each_service
def test_in_a_run(tmp_path, monkeypatch, name):
    """By name among a run's trackers; a run that is cut off and run again logs each step that is done, once done."""
    pytest.importorskip(PACKAGES[name])
    made = []

    def multi(trackers):  # with time enough for a busy machine
        made.append(MultiTracker(trackers, timeout=120.0))
        return made[-1]

    monkeypatch.setattr("rlkit.tracking.MultiTracker", multi)
    for total in (2, 4):
        with Run(tmp_path / "run", seed=0, trackers=["jsonl", name], config=CONFIG) as run:
            policy = run.connect("toy")
            for step in run.steps(total):
                run.log({"train/loss": 0.5 * step, "train/inf": math.inf})
                run.log_trajectories([GROUP])
                run.checkpoint(policy)
        assert made[-1].metrics == {}
    assert read_service(name, tmp_path)[0] == {(step, 0.5 * step) for step in range(4)}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_it_continues_a_run_by_its_id(tmp_path, name):
    options = {"id": "abc123"} if name == "wandb" else {}
    for step in (0, 1):
        tracker = make(name, tmp_path, **options)
        tracker.log({"train/loss": 0.5}, step)
        options["id"] = tracker._run.id if name == "wandb" else tracker._run
        tracker.close()
    assert name == "mlflow" or options["id"] == "abc123"
    assert read_service(name, tmp_path)[0] == {(0, 0.5), (1, 0.5)}


def test_tensorboard_goes_back(tmp_path):
    """What is logged after a rewind replaces what was logged before, in one reader's view."""
    tracker = make("tensorboard", tmp_path)
    for step in range(4):
        tracker.log({"train/loss": 0.25}, step)
    tracker.rewind(2, None)
    for step in (2, 3, 4):
        tracker.log({"train/loss": 0.5}, step)
    tracker.close()
    assert read_tensorboard(tmp_path)[0] == {(0, 0.25), (1, 0.25), (2, 0.5), (3, 0.5), (4, 0.5)}


@each_service
def test_what_is_refused(tmp_path, name):
    pytest.importorskip(PACKAGES[name])
    tracker = for_run(name, tmp_path)
    for metrics in ({"a": "text"}, {3: 1.0}, 3):
        with pytest.raises(DataError, match=r"log\(metrics\)"):
            tracker.log(metrics, 0)
    with pytest.raises(ConfigError, match="step"):
        tracker.log({"a": 1.0}, -1)
    tracker.log({}, 0)
    tracker.log_trajectories([], 0)
    tracker.close()
    tracker.close()
    with pytest.raises(ConfigError, match="is closed"):
        tracker.log({"a": 1.0}, 0)
    for options in ({"config": 3}, {"trajectories": -1}):
        with pytest.raises(ConfigError):
            make(name, tmp_path, **options)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
