"""The trackers that hand on to other packages, each read back with that package's own reader, offline."""

from __future__ import annotations

import importlib.util
import math
import re
import sqlite3
import time

import pytest

from rlkit import ConfigError, Sample, _install
from rlkit.tracking import Several, registry
from rlkit.trajectory import Group, Trajectory, Turn

CANARY = "canary-5d2e9b7af31c"
CONFIG = {"lr": 1e-4, "api_key": CANARY, "nested": {"password": CANARY, "url": f"https://x?k={CANARY}"}}
GROUP = Group(
    [Trajectory([Turn(Sample([65], [66], [-0.5]), 1.0)], messages=[{"role": "user", "content": f"hi {CANARY}"}])]
)


@pytest.fixture(autouse=True)
def _canary(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", CANARY)


def play(tracker):
    with Several([tracker], timeout=120.0) as several:
        several.log({"train/loss": 0.5, "train/nan": math.nan, "train/inf": math.inf}, 3)
        several.log_trajectories([GROUP], 3)
        several.log({"train/loss": 0.25}, 1)  # a run that was resumed from an earlier step
    assert several.metrics == {}


def leaks(folder):
    return [path for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


@pytest.mark.parametrize(("name", "extra"), [(n, n) for n in ("wandb", "tensorboard", "trackio", "mlflow")])
def test_a_missing_package_names_the_extra(monkeypatch, tmp_path, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(_install.command(extra))):
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


def test_wandb_offline(tmp_path):
    wandb = pytest.importorskip("wandb")
    play(registry["wandb"]("rlkit-tests", name="run", folder=tmp_path, mode="offline", config=CONFIG))
    (file,) = tmp_path.rglob("*.wandb")
    from wandb.proto import wandb_internal_pb2

    def records():
        return [wandb_internal_pb2.Record.FromString(data) for data in logged(file.read_bytes())]

    for _ in range(600):  # wandb's own process may write the file a moment after the run is finished
        if any(record.HasField("exit") for record in records()):
            break
        time.sleep(0.05)
    history, config = [], {}
    for record in records():
        if record.HasField("history"):
            history.append({"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item})
        if record.HasField("run"):
            config |= {i.key: i.value_json for i in record.run.config.update}
    assert [(row["train/loss"], row["step"]) for row in history if "train/loss" in row] == [("0.5", "3"), ("0.25", "1")]
    assert config["lr"] == "0.0001"
    assert config["api_key"] == '"***"'
    assert any("trajectories" in "".join(row) for row in history)
    assert leaks(tmp_path) == []
    assert wandb.run is None


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    play(registry["tensorboard"](tmp_path, config=CONFIG))
    assert list(tmp_path.glob("events*"))
    assert leaks(tmp_path) == []
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert {(event.step, event.value) for event in read.Scalars("train/loss")} == {(3, 0.5), (1, 0.25)}
    assert math.isnan(read.Scalars("train/nan")[0].value)


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):  # read at import, which another test may have done
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path, raising=False)
    play(registry["trackio"]("rlkit-tests", name="run", config=CONFIG))
    (database,) = tmp_path.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    connection.close()
    assert [step for step, metrics in rows if "train/loss" in str(metrics)] == [3, 1]
    assert leaks(tmp_path) == []
    assert trackio is not None


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    uri = (tmp_path / "store").as_uri()
    play(registry["mlflow"]("rlkit-tests", name="run", uri=uri, config=CONFIG))
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("rlkit-tests").experiment_id])
    assert {(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")} == {
        (3, 0.5),
        (1, 0.25),
    }
    assert run.data.params["lr"] == "0.0001"
    assert run.data.params["nested.password"] == "***"
    assert run.info.status == "FINISHED"
    assert leaks(tmp_path) == []
