"""Metrics and trajectories in a run's folder."""

from __future__ import annotations

import json
import math
import stat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit import CheckpointError, ConfigError, DataError, Sample, storage
from rlkit.tracking import Jsonl, Tracker, read_metrics
from rlkit.tracking.jsonl import FILES
from rlkit.trajectory import Failure, Group, Trajectory, Turn
from tests.each import for_each
from tests.properties import examples


def group(step=0, number=0, texts=("ab", "c"), **options):
    members = [Trajectory([Turn(Sample([65], list(t.encode()), [-0.5] * len(t)), 1.0)], env="env") for t in texts]
    return Group(members, env="env", step=step, number=number, **options)


def logged(folder):
    return [(row["step"], row["metrics"]) for row in read_metrics(folder)]


def test_what_was_logged_is_read(tmp_path):
    tracker = Jsonl(tmp_path / "new" / "folder", clock=lambda: 5.0)
    assert isinstance(tracker, Tracker)
    tracker.log({"a": 1, "b": np.float32(0.5), "c": np.array(True)}, 0)
    tracker.log({"a": 2.0}, np.int64(1))
    assert read_metrics(tmp_path / "new" / "folder") == [
        {"step": 0, "time": 5.0, "metrics": {"a": 1.0, "b": 0.5, "c": 1.0}},
        {"step": 1, "time": 5.0, "metrics": {"a": 2.0}},
    ]


def test_numbers_that_are_not_finite_are_kept_in_json_that_anyone_can_read(tmp_path):
    metrics = {"nan": math.nan, "up": math.inf, "down": -math.inf, "big": 10**400, "small": -(10**400)}
    Jsonl(tmp_path).log(metrics, 0)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    written = json.loads(line, parse_constant=pytest.fail)["metrics"]
    infinite = {"up": "Infinity", "down": "-Infinity", "big": "Infinity", "small": "-Infinity"}
    assert written == {"nan": "NaN", **infinite}
    ((_, read),) = logged(tmp_path)
    assert math.isnan(read.pop("nan"))
    assert read == {name: float(text) for name, text in infinite.items()}


@for_each(
    ("metrics", "step", "error", "says"),
    [
        ({"a": "text"}, 0, DataError, r"log\(metrics\)\['a'\]: got 'text'"),
        ({"a": np.ones(2)}, 0, DataError, "expected a number"),
        ({"a": 1j}, 0, DataError, "expected a number"),
        ({1: 1.0}, 0, DataError, "non-empty names"),
        ({"": 1.0}, 0, DataError, "non-empty names"),
        ([("a", 1.0)], 0, DataError, "a mapping of names"),
        ({"a": 1.0}, -1, ConfigError, r"log\(step\): got -1"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(tmp_path, metrics, step, error, says):
    tracker = Jsonl(tmp_path)
    with pytest.raises(error, match=says):
        tracker.log(metrics, step)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_folders_and_positions_that_are_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Jsonl(tmp_path / "file")
    for folder in (None, 3, ""):
        with pytest.raises(ConfigError, match=r"Jsonl\(folder\)"):
            Jsonl(folder)
    for position in ({"metrics.jsonl": -1}, {"metrics.jsonl": "3"}, {"trajectories.jsonl": 1.5}, [3]):
        with pytest.raises(CheckpointError, match=r"rewind\(position\)"):
            Jsonl(tmp_path / "run").rewind(0, position)


@examples(50)  # many small files
@given(
    steps=st.lists(st.integers(0, 12), max_size=20), at=st.integers(0, 13), torn=st.booleans(), stay=st.integers(0, 20)
)
def test_rewind_leaves_what_came_before_a_step(tmp_path_factory, steps, at, torn, stay):
    """All lines before the position, and those below the step, stay in order, byte for byte; all others go."""
    folder = tmp_path_factory.mktemp("run")
    tracker, position = Jsonl(folder), None
    for i, step in enumerate(steps):
        position = tracker.sync() if i == stay else position
        tracker.log({"i": float(i)}, step)
        tracker.log_trajectories([group(step, i)], step, advantages=[0.5, -0.5])
    before = {name: (folder / name).read_bytes().splitlines(keepends=True) for name in FILES}
    if torn:
        for name in FILES:
            with (folder / name).open("ab") as file:
                file.write(b'{"step": 0, "ti')
    first = 0 if position is None else stay
    assert tracker.rewind(at, position) == sum(step >= at for step in steps[first:])
    for name in FILES:
        numbered = zip(before[name], steps, strict=True)
        kept = [line for i, (line, step) in enumerate(numbered) if step < at or i < first]
        assert (folder / name).read_bytes().splitlines(keepends=True) == kept
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert found == dict.fromkeys(FILES, 0o600)


def test_what_is_no_record_of_metrics_is_left_out(tmp_path):
    good = '{"step": 1, "time": 2.0, "metrics": {"a": 1, "b": "text", "c": null, "d": "NaN"}}'
    bad = ["[]", "null", '{"step": 1}', '{"step": -1, "metrics": {}}', '{"step": "1", "metrics": {}}', "[" * 9999, ""]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*bad, good, *bad]))
    (row,) = read_metrics(tmp_path)
    assert (row["step"], row["time"], sorted(row["metrics"])) == (1, 2.0, ["a", "d"])
    with pytest.raises(CheckpointError, match="is not a run's folder"):
        read_metrics(tmp_path / "nothing")


def test_trajectories_come_back_with_values_in_their_lines(tmp_path):
    """Under the step that they trained, which asynchronous rollouts were not made for. Numbers in float32 are exact."""
    thirds = -np.arange(1, 4, dtype=np.float32) / 3
    failure = Failure("env", "ValueError", "no")
    groups = [group(step=3, number=0, failures=[failure]), group(number=1, texts=("xyz",))]
    advantages = [np.float32(0.1), [0.5], np.array([1, 2, np.nan])]
    Jsonl(tmp_path).log_trajectories(groups, 5, advantages=advantages, trainer_logprobs=[[-1, -2], [-3.0], thirds])
    lines = [json.loads(line) for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    first, second, third = [trajectory for line in lines for trajectory in line["trajectories"]]
    assert np.float32(first["advantages"]) == np.float32(0.1)
    assert (first["trainer_logprobs"], second["advantages"]) == ([-1.0, -2.0], [0.5])
    assert third["advantages"] == [1.0, 2.0, "NaN"]
    assert np.array(third["trainer_logprobs"], np.float32).tobytes() == thirds.tobytes()
    read = list(storage.read(tmp_path / "trajectories.jsonl", strict=True))
    assert [(each.step, each.number, len(each), each.failures) for each in read] == [
        (5, 0, 2, (failure,)),
        (5, 1, 1, ()),
    ]
    assert read[0].trajectories[0].turns[0].tokens.tolist() == list(b"ab")


@for_each(
    ("given", "says"),
    [
        ({"advantages": [1.0]}, "advantages: has length 1; expected 2 [(]one per trajectory"),
        ({"advantages": 1.0}, "advantages: got 1.0"),
        ({"advantages": [1.0, [1.0, 2.0]]}, r"advantages\[1\]: has shape \(2,\)"),
        ({"trainer_logprobs": [[-1.0], [-1.0]]}, r"trainer_logprobs\[0\]: has shape \(1,\)"),
        ({"trainer_logprobs": [-1.0, [-1.0]]}, r"trainer_logprobs\[0\]: has shape \(\); expected shape \(2,\)"),
    ],
)
def test_what_does_not_fit_the_tokens_is_refused(tmp_path, given, says):
    tracker = Jsonl(tmp_path)
    with pytest.raises(DataError, match=says):
        tracker.log_trajectories([group()], 0, **given)
    with pytest.raises(DataError, match=r"groups\[0\]"):
        tracker.log_trajectories(["group"], 0)
    assert (tmp_path / "trajectories.jsonl").read_bytes() == b""
