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
from rlkit.backends.toy import ByteTokenizer
from rlkit.tracking import Jsonl, Tracker, read_metrics
from rlkit.tracking.jsonl import lines
from rlkit.trajectory import Failure, Group, Trajectory, Turn
from tests.properties import examples


def group(step=0, number=0, texts=("ab", "c"), env="env"):
    members = [Trajectory([Turn(Sample([65], list(t.encode()), [-0.5] * len(t)), 1.0)], env=env) for t in texts]
    return Group(members, env=env, step=step, number=number)


def logged(folder):
    return [(row["step"], row["metrics"]) for row in read_metrics(folder)]


def test_it_is_a_tracker(tmp_path):
    assert isinstance(Jsonl(tmp_path), Tracker)


def test_what_was_logged_is_read(tmp_path):
    tracker = Jsonl(tmp_path / "new" / "folder", clock=lambda: 5.0)
    tracker.log({"a": 1, "b": np.float32(0.5), "c": np.array(True)}, 0)
    tracker.log({"a": 2.0}, np.int64(1))
    assert read_metrics(tmp_path / "new" / "folder") == [
        {"step": 0, "time": 5.0, "metrics": {"a": 1.0, "b": 0.5, "c": 1.0}},
        {"step": 1, "time": 5.0, "metrics": {"a": 2.0}},
    ]


def test_numbers_that_are_not_finite_are_kept_in_json_that_anyone_can_read(tmp_path):
    Jsonl(tmp_path).log({"nan": math.nan, "up": math.inf, "down": -math.inf, "big": 10**400}, 0)

    def refuse(name):
        raise AssertionError(name)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    written = json.loads(line, parse_constant=refuse)["metrics"]
    assert written == {"nan": "NaN", "up": "Infinity", "down": "-Infinity", "big": "Infinity"}
    ((_, read),) = logged(tmp_path)
    assert math.isnan(read["nan"])
    assert (read["up"], read["down"], read["big"]) == (math.inf, -math.inf, math.inf)


@pytest.mark.parametrize(
    ("metrics", "step", "error", "says"),
    [
        ({"a": "text"}, 0, DataError, r"log\(metrics\)\['a'\]: got 'text'"),
        ({"a": None}, 0, DataError, "got None"),
        ({"a": [1]}, 0, DataError, "expected a number"),
        ({"a": np.ones(2)}, 0, DataError, "expected a number"),
        ({"a": 1j}, 0, DataError, "expected a number"),
        ({1: 1.0}, 0, DataError, "non-empty names"),
        ({"": 1.0}, 0, DataError, "non-empty names"),
        ([("a", 1.0)], 0, DataError, "a mapping of names"),
        ({"a": 1.0}, -1, ConfigError, r"log\(step\): got -1"),
        ({"a": 1.0}, 1.0, ConfigError, "an integer"),
        ({"a": 1.0}, True, ConfigError, "an integer"),
        ({"a": 1.0}, None, ConfigError, "an integer"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(tmp_path, metrics, step, error, says):
    tracker = Jsonl(tmp_path)
    with pytest.raises(error, match=says):
        tracker.log(metrics, step)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_folder_that_can_not_be_one(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Jsonl(tmp_path / "file")
    for folder in (None, 3, ""):
        with pytest.raises(ConfigError, match=r"Jsonl\(folder\)"):
            Jsonl(folder)
    with pytest.raises(ConfigError, match=r"policy\.tokenizer"):
        Jsonl(tmp_path, tokenizer="gpt2")


def test_files_are_their_owners(tmp_path):
    tracker = Jsonl(tmp_path, tokenizer=ByteTokenizer())
    tracker.log({"a": 1.0}, 0)
    tracker.log_trajectories([group()], 0, advantages=[1.0, -1.0])
    tracker.rewind(0)
    tracker.close()
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert found == dict.fromkeys(("metrics.jsonl", "trajectories.jsonl", "tokens.jsonl", "vocabulary.jsonl"), 0o600)


@given(keep=st.integers(0, 200))
def test_a_crash_harms_the_last_line_at_most(tmp_path_factory, keep):
    """Cut anywhere, the file gives the whole lines before the cut, and what is logged next is whole."""
    folder = tmp_path_factory.mktemp("run")
    tracker = Jsonl(folder, clock=lambda: 0.0)
    for step in range(3):
        tracker.log({"a": float(step)}, step)
    path = folder / "metrics.jsonl"
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    whole = data.count(b"\n") + (1 if data and data.rpartition(b"\n")[2].endswith(b"}}") else 0)
    assert [step for step, _ in logged(folder)] == list(range(whole))
    Jsonl(folder).log({"a": 9.0}, 9)
    assert [step for step, _ in logged(folder)] == [*range(whole), 9]


@examples(50)  # many small files
@given(
    steps=st.lists(st.integers(0, 12), max_size=20),
    at=st.integers(0, 13),
    torn=st.booleans(),
)
def test_rewind_leaves_what_came_before_a_step(tmp_path_factory, steps, at, torn):
    """For any order of logging: all lines below the step stay, in order, byte for byte; all others go."""
    folder = tmp_path_factory.mktemp("run")
    tracker = Jsonl(folder)
    for i, step in enumerate(steps):
        tracker.log({"i": float(i)}, step)
        tracker.log_trajectories([group(step, i)], step, advantages=[0.5, -0.5])
    names = ("metrics.jsonl", "tokens.jsonl", "trajectories.jsonl")
    before = {name: (folder / name).read_bytes().splitlines(keepends=True) for name in names}
    if torn:
        for name in names:
            with (folder / name).open("ab") as file:
                file.write(b'{"step": 0, "ti')
    assert tracker.rewind(at) == sum(step >= at for step in steps)
    for name in names:
        kept = [line for line, step in zip(before[name], steps, strict=True) if step < at]
        assert (folder / name).read_bytes().splitlines(keepends=True) == kept
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_a_resumed_run_has_each_step_once(tmp_path):
    first = Jsonl(tmp_path)
    for step in range(7):
        first.log({"loss": float(step)}, step)
    resumed = Jsonl(tmp_path)
    resumed.rewind(4)
    for step in range(4, 10):
        resumed.log({"loss": float(step)}, step)
    assert logged(tmp_path) == [(step, {"loss": float(step)}) for step in range(10)]


def test_what_is_no_record_of_metrics_is_left_out(tmp_path):
    good = '{"step": 1, "time": 2.0, "metrics": {"a": 1, "b": "text", "c": null, "d": "NaN"}}'
    bad = ["[]", "null", '{"step": 1}', '{"step": -1, "metrics": {}}', '{"step": "1", "metrics": {}}', "[" * 9999, ""]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*bad, good, *bad]))
    (row,) = read_metrics(tmp_path)
    assert (row["step"], row["time"], sorted(row["metrics"])) == (1, 2.0, ["a", "d"])
    with pytest.raises(CheckpointError, match="is not a run's folder"):
        read_metrics(tmp_path / "nothing")


def test_trajectories_come_back_under_the_step_they_were_logged_at(tmp_path):
    """Groups made for another step (asynchronous rollouts) stand under the step that they trained."""
    tracker = Jsonl(tmp_path)
    tracker.log_trajectories([group(step=3, number=1)], 5)
    (read,) = storage.read(tmp_path / "trajectories.jsonl")
    assert (read.step, read.number, len(read)) == (5, 1, 2)
    assert read.trajectories[0].turns[0].tokens.tolist() == list(b"ab")


def test_advantages_and_logprobs_stand_beside(tmp_path):
    tracker = Jsonl(tmp_path)
    groups = [group(number=0), group(number=1, texts=("xyz",))]
    tracker.log_trajectories(
        groups, 2, advantages=[1.0, [0.5], np.array([1, 2, np.nan])], trainer_logprobs=[[-1, -2], [-3.0], [-1] * 3]
    )
    assert list(lines(tmp_path / "tokens.jsonl")) == [
        {
            "step": 2,
            "env": "env",
            "index": None,
            "number": 0,
            "advantages": [1.0, [0.5]],
            "trainer_logprobs": [[-1.0, -2.0], [-3.0]],
        },
        {
            "step": 2,
            "env": "env",
            "index": None,
            "number": 1,
            "advantages": [[1.0, 2.0, "NaN"]],
            "trainer_logprobs": [[-1.0, -1.0, -1.0]],
        },
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"advantages": [1.0]}, "advantages: has 1 entries; expected 2"),
        ({"advantages": 1.0}, "advantages: got 1.0"),
        ({"advantages": [1.0, [1.0, 2.0]]}, r"advantages\[1\]: has shape \(2,\)"),
        ({"trainer_logprobs": [[-1.0], [-1.0]]}, r"trainer_logprobs\[0\]: has shape \(1,\)"),
        ({"trainer_logprobs": [None, [-1.0]]}, r"trainer_logprobs\[0\]: is None"),
    ],
)
def test_what_does_not_fit_the_tokens_is_refused(tmp_path, given, says):
    tracker = Jsonl(tmp_path)
    with pytest.raises(DataError, match=says):
        tracker.log_trajectories([group()], 0, **given)
    with pytest.raises(DataError, match=r"groups\[0\]"):
        tracker.log_trajectories(["group"], 0)
    assert (tmp_path / "trajectories.jsonl").read_bytes() == (tmp_path / "tokens.jsonl").read_bytes() == b""


def test_the_vocabulary_has_each_token_once_and_characters_of_several_tokens(tmp_path):
    tracker = Jsonl(tmp_path, tokenizer=ByteTokenizer())
    text = "n€"
    sample = Sample([65, 256], [*text.encode(), 257], [-0.5] * 5)
    for step in range(2):
        tracker.log_trajectories([Group([Trajectory([Turn(sample)])])], step)
    (line,) = lines(tmp_path / "vocabulary.jsonl")
    texts = line["texts"]
    assert texts["65"] == "A"
    assert texts["256"] == "<|im_start|>"
    assert texts["257"] == "<|im_end|>"
    assert texts["226,130,172"] == "€"
    Jsonl(tmp_path, tokenizer=ByteTokenizer()).log_trajectories([Group([Trajectory([Turn(sample)])])], 2)
    assert len(list(lines(tmp_path / "vocabulary.jsonl"))) == 1  # a resumed run knows what is there


def test_failures_are_kept(tmp_path):
    failed = Group([], failures=[Failure("env", "ValueError", "no")])
    Jsonl(tmp_path).log_trajectories([failed], 0)
    (read,) = storage.read(tmp_path / "trajectories.jsonl")
    assert read.failures[0].kind == "ValueError"
