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
GROUP = Group(
    [Trajectory([Turn(Sample([65], [66], [-0.5]), 1.0)], messages=[{"role": "user", "content": f"hi {CANARY}"}])]
)


pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings(
        "ignore:The ``noload`` loader strategy:DeprecationWarning"
    ),  # MLflow's own, of SQLAlchemy
]
NAMES = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio", "mlflow": "mlflow"}


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


def play(tracker):
    with MultiTracker([tracker], timeout=120.0) as several:
        several.log({"train/loss": 0.5, "train/nan": math.nan, "train/inf": math.inf}, 3)
        several.log_trajectories([GROUP], 3)
        several.log({"train/loss": 0.25}, 1)  # a run that was resumed from an earlier step
    assert several.metrics == {}


def leaks(folder):
    return [path for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


@pytest.mark.parametrize(("name", "extra"), [(n, n) for n in ("wandb", "tensorboard", "trackio", "mlflow")])
def test_a_missing_package_names_the_extra(monkeypatch, tmp_path, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(_runtime.command(extra))):
        registry[name](str(tmp_path))


def logged(data):
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB; checksum, length, kind) behind 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole, or its last part
            yield whole
            whole = b""


def wandb_records(folder):
    """(history, settings) of every run below, once wandb's own process has written them to their end."""
    from wandb.proto import wandb_internal_pb2

    history, config = [], {}
    for file in sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime):
        records = []
        for _ in range(600):  # a moment after the run is finished
            records = [wandb_internal_pb2.Record.FromString(data) for data in logged(file.read_bytes())]
            if any(record.HasField("exit") for record in records):
                break
            time.sleep(0.05)
        for record in records:
            if record.HasField("history"):
                history.append({"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item})
            if record.HasField("run"):
                config |= {i.key: i.value_json for i in record.run.config.update}
    return history, config


def trackio_rows(folder):
    (database,) = folder.glob("*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute("select step, metrics from metrics order by id").fetchall()


def losses(name, folder, client=None):
    """{(step, train/loss)} as the package itself reads them."""
    if name == "wandb":
        history, _ = wandb_records(folder)
        return {(int(row["step"]), float(row["train/loss"])) for row in history if "train/loss" in row}
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (place,) = {path.parent for path in folder.rglob("events*")}
        return {(e.step, e.value) for e in EventAccumulator(str(place)).Reload().Scalars("train/loss")}
    if name == "trackio":
        rows = [(step, json.loads(text)) for step, text in trackio_rows(folder)]
        return {(step, metrics["train/loss"]) for step, metrics in rows if "train/loss" in metrics}
    import mlflow

    client = client or mlflow.MlflowClient()
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    found = [client.get_metric_history(run.info.run_id, "train/loss") for run in runs]
    return {(m.step, m.value) for history in found for m in history}


@pytest.mark.parametrize("name", NAMES)
def test_in_a_run(tmp_path, monkeypatch, name):
    """By name among a run's trackers; a run that is cut off and run again logs each step that is done, once done."""
    pytest.importorskip(NAMES[name])
    _trackio_folder(name, monkeypatch, tmp_path)
    made = []

    def several(trackers):  # with time enough for a busy machine
        made.append(MultiTracker(trackers, timeout=120.0))
        return made[-1]

    monkeypatch.setattr("rlkit.tracking.MultiTracker", several)
    for total in (2, 4):
        with Run(tmp_path / "run", seed=0, trackers=["jsonl", name], config=CONFIG) as run:
            policy = run.connect("toy")
            for step in run.steps(total):
                run.log({"train/loss": 0.5 * step, "train/inf": math.inf})
                run.log_trajectories([GROUP])
                run.checkpoint(policy)
        assert made[-1].metrics == {}
    assert losses(name, tmp_path) == {(step, 0.5 * step) for step in range(4)}
    assert leaks(tmp_path) == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused(tmp_path, name):
    """Alone, a tracker raises: for what is no number, and after it was closed. Closing an unused one does nothing."""
    pytest.importorskip(NAMES[name])
    tracker = for_run(name, tmp_path)
    for metrics in ({"a": "text"}, {3: 1.0}, 3):
        with pytest.raises(DataError, match=r"log\(metrics\)"):
            tracker.log(metrics, 0)
    for step in (-1, 1.5, True, None):
        with pytest.raises(ConfigError, match="step"):
            tracker.log({"a": 1.0}, step)
    tracker.log({}, 0)
    tracker.log_trajectories([], 0)
    tracker.close()
    tracker.close()
    with pytest.raises(ConfigError, match="is closed"):
        tracker.log({"a": 1.0}, 0)
    for options in ({"config": 3}, {"trajectories": -1}):
        with pytest.raises(ConfigError):
            registry[name](**({"folder": tmp_path} if name == "tensorboard" else {}), **options)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _trackio_folder(name, monkeypatch, folder):
    if name != "trackio":
        return
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):  # read at import, which another test may have done
        monkeypatch.setattr(module, "TRACKIO_DIR", folder, raising=False)


def test_wandb_offline(tmp_path):
    wandb = pytest.importorskip("wandb")
    play(registry["wandb"]("rlkit-tests", name="run", folder=tmp_path, mode="offline", config=CONFIG))
    history, config = wandb_records(tmp_path)
    assert [(row["train/loss"], row["step"]) for row in history if "train/loss" in row] == [("0.5", "3"), ("0.25", "1")]
    assert config["lr"] == "0.0001"
    assert config["api_key"] == '"***"'
    assert any("trajectories" in "".join(row) for row in history)
    assert leaks(tmp_path) == []
    assert wandb.run is None


def test_wandb_goes_on_with_a_run(tmp_path):
    """By its id: what is logged later belongs to the same run."""
    pytest.importorskip("wandb")
    for step in (0, 1):
        tracker = registry["wandb"](id="abc123", folder=tmp_path, mode="offline")
        tracker.log({"train/loss": 0.5}, step)
        assert tracker._run.id == "abc123"
        tracker.close()
    assert losses("wandb", tmp_path) == {(0, 0.5), (1, 0.5)}


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    play(registry["tensorboard"](tmp_path, config=CONFIG))
    assert list(tmp_path.glob("events*"))
    assert leaks(tmp_path) == []
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert {(event.step, event.value) for event in read.Scalars("train/loss")} == {(3, 0.5), (1, 0.25)}
    assert math.isnan(read.Scalars("train/nan")[0].value)
    texts = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    assert any("api_key" in text and "***" in text for text in texts.values())
    assert any("hi ***" in text for text in texts.values())


def test_tensorboard_goes_back(tmp_path):
    """What is logged after a rewind stands in the place of what was logged before, in one reader's view."""
    pytest.importorskip("tensorboardX")
    tracker = registry["tensorboard"](tmp_path)
    for step in range(4):
        tracker.log({"train/loss": 0.25}, step)
    tracker.rewind(2)
    for step in (2, 3, 4):
        tracker.log({"train/loss": 0.5}, step)
    tracker.close()
    assert losses("tensorboard", tmp_path) == {(0, 0.25), (1, 0.25), (2, 0.5), (3, 0.5), (4, 0.5)}


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    _trackio_folder("trackio", monkeypatch, tmp_path)
    play(registry["trackio"]("rlkit-tests", name="run", config=CONFIG))
    rows = trackio_rows(tmp_path)
    assert [step for step, metrics in rows if "train/loss" in str(metrics)] == [3, 1]
    assert any("trajectories" in str(metrics) for _, metrics in rows)
    assert leaks(tmp_path) == []


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_mlflow(tmp_path, monkeypatch, store):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri() if store == "file" else f"sqlite:///{tmp_path}/store.db"
    play(registry["mlflow"]("rlkit-tests", name="run", uri=uri, config=CONFIG))
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("rlkit-tests").experiment_id])
    assert losses("mlflow", tmp_path, client) == {(3, 0.5), (1, 0.25)}
    assert run.data.params["lr"] == "0.0001"
    assert run.data.params["nested.password"] == "***"
    assert run.info.status == "FINISHED"
    again = registry["mlflow"](id=run.info.run_id, uri=uri)
    again.log({"train/loss": 0.125}, 4)
    again.close()
    assert losses("mlflow", tmp_path, client) == {(3, 0.5), (1, 0.25), (4, 0.125)}
    assert leaks(tmp_path) == []
