"""Metrics and trajectories of a run that is cut off: each step once, nothing lost without a word."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest

import rlkit
from rlkit import Sample, _files
from rlkit.runs import Run
from rlkit.trajectory import Group, Trajectory, Turn

GROUP = Group([Trajectory([Turn(Sample([65], [66, 67], [-0.5, -0.5]), 1.0)])])
LOGS = ("metrics.jsonl", "trajectories.jsonl")


def steps_of(folder):
    return {name: [json.loads(line).get("step") for line in (folder / name).read_text().splitlines()] for name in LOGS}


def play(folder, total, *, cut=None, every=1, late=False, **options):
    """Steps that log, before or after (``late``) their checkpoint; ``cut``: the step after whose logging it dies."""
    run = Run(folder, seed=0, trackers=("jsonl",), **options)
    policy = run.connect("toy")
    for step in run.steps(total):
        if late:
            run.checkpoint(policy, every=every)
        run.log({"train/loss": float(step)})
        run.log_trajectories([GROUP], advantages=[1.0])
        if step == cut:
            run._release()  # as the end of a process does, which closes nothing
            return
        if not late:
            run.checkpoint(policy, every=every)
    run.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_each_step_is_there_once(tmp_path, every, late):
    for cut in (0, 1, 2, 4, 4, 5, 7):
        play(tmp_path, 9, cut=cut, every=every, late=late)
    play(tmp_path, 9, every=every, late=late)
    assert steps_of(tmp_path) == {name: list(range(9)) for name in LOGS}


def test_resuming_reads_and_writes_nothing_that_stays(tmp_path, monkeypatch):
    """However long the logs are: the file stays the same one, and only what is behind the checkpoint is read."""
    play(tmp_path, 6, cut=5, every=5)
    path = tmp_path / "trajectories.jsonl"
    before, read = path.stat(), []
    whole = _files.read_line
    monkeypatch.setattr(_files, "read_line", lambda line: read.append(line) or whole(line))
    Run(tmp_path, trackers=("jsonl",)).close()
    assert len(read) == 2  # a line of the step after the checkpoint in each of the files
    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_size < before.st_size
    assert steps_of(tmp_path) == {name: list(range(5)) for name in LOGS}
    assert _files.rewind(path, 4) == 1  # also from its beginning, where lines stay before those that go
    assert path.stat().st_ino == before.st_ino
    path.write_bytes(path.read_bytes()[:-1])
    assert _files.rewind(path, 4) == 0
    assert path.read_bytes().endswith(b"\n")  # where only the end of the last line is missing, it is added


def test_logs_are_synced_before_the_checkpoint_that_counts_them(tmp_path, monkeypatch):
    order, whole = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(str(Path(f"/proc/self/fd/{fd}").readlink())) or whole(fd))
    with Run(tmp_path, seed=0, trackers=("jsonl",)) as run:
        policy = run.connect("toy")
        run.log({"a": 1.0})
        run.log_trajectories([GROUP], advantages=[1.0])
        order.clear()
        record = run.checkpoint(policy)
        names = [re.sub(r"\.partial.*", "", path.removeprefix(f"{tmp_path}/")) for path in order]
        first = next(i for i, name in enumerate(names) if name.startswith("checkpoints"))
        assert set(LOGS) <= set(names[:first])
        assert record.logged["Jsonl"] == {name: (tmp_path / name).stat().st_size for name in LOGS}
        order.clear()
        run.step += 1
        run.checkpoint(policy)
        assert not [path for path in order if path.endswith(".jsonl")]  # nothing new


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "zeroed": lambda data: bytes(len(data)),
    "tail zeroed": lambda data: data[:-60] + bytes(60),
    "last byte lost": lambda data: data[:-1],
}


@pytest.mark.parametrize("name", LOGS)
def test_lines_that_a_power_failure_took_are_warned_of(tmp_path, name):
    play(tmp_path / "whole", 5)
    for damage, damaged in DAMAGES.items():
        folder = tmp_path / damage
        shutil.copytree(tmp_path / "whole", folder)
        (folder / name).write_bytes(damaged((folder / name).read_bytes()))
        with pytest.warns(RuntimeWarning, match=rf"{name}.*lines may be lost"):
            Run(folder, trackers=("jsonl",)).close()
        left = steps_of(folder)
        assert left.pop(name) == list(range(len((folder / name).read_text().splitlines()))), damage
        assert all(steps == list(range(5)) for steps in left.values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            play(folder, 6)
        play(folder, 7)  # the new checkpoint counts what there is, so it is not said again
        assert steps_of(folder)[name][-2:] == [5, 6]


def test_a_tracker_of_ones_own_needs_no_place(tmp_path):
    class Own:
        told = None

        def log(self, metrics, step): ...
        def log_trajectories(self, groups, step): ...
        def close(self): ...
        def rewind(self, step, position):
            assert position is None
            self.told = step

    for expected in (0, 2):
        own = Own()
        with Run(tmp_path, trackers=[own]) as run:
            assert own.told == expected
            for _ in run.steps(2):
                run.checkpoint(run.connect("toy"))


class TestSeed:
    """The seed is in every checkpoint, and before the first one in run.json."""

    def test_it_comes_from_the_checkpoint(self, tmp_path):
        play(tmp_path, 2)
        path = tmp_path / "run.json"
        other = '{"format": 1, "seed": 9}'
        for text in (None, other, "", "{", "[]", '{"seed": 1e999}', '{"seed": 1.5}', "[" * 9000, "\ud800"):
            path.unlink()
            if text is not None:
                path.write_bytes(text.encode("utf-8", "surrogatepass"))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with Run(tmp_path, seed=0, trackers=()) as run:
                    assert (run.seed, run.step) == (0, 2), text
            assert len(said) == (text not in (None, other))
            assert all("run.json is damaged, and written again" in str(each.message) for each in said)
            assert json.loads(path.read_text())["seed"] == 0

    def test_without_a_checkpoint_it_comes_from_run_json(self, tmp_path):
        with Run(tmp_path, trackers=()) as run:
            seed = run.seed
        with Run(tmp_path, trackers=()) as run:
            assert run.seed == seed
        with pytest.raises(rlkit.ConfigError, match=f"began with {seed}"):
            Run(tmp_path, seed=seed + 1, trackers=())
        for text in ("", "{", "[]", '{"seed": 1e999}', '{"seed": -1}', '{"seed": true}', "[" * 9000, "{}"):
            (tmp_path / "run.json").write_text(text)
            with pytest.raises(rlkit.CheckpointError, match="damaged"):
                Run(tmp_path, trackers=())
            assert (tmp_path / "run.json").read_text() == text


NOTHING = {"rollout/with_signal": 0.0, "rollout/cut": 0.5}


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        ([NOTHING] * 2, False),
        ([NOTHING] * 9, True),
        ([NOTHING, NOTHING, {"rollout/with_signal": 0.25}, NOTHING, NOTHING], False),
        ([NOTHING | {"train/with_signal": 1.0}] * 3, False),  # a baseline that makes a signal of constant rewards
        ([{"rollout/with_signal": 1.0, "train/with_signal": 0.0}] * 3, True),
        ([{"train/loss": 0.0}] * 9, False),
    ],
)
def test_training_on_nothing_is_said_once(tmp_path, caplog, steps, warned):
    """After three steps in a row, however many calls log a step."""
    with Run(tmp_path, trackers=()) as run:
        policy = run.connect("toy")
        policy.sampler().result().sample([65], rlkit.SamplingParams(max_tokens=8)).result()
        for step in run.steps(len(steps)):
            for name, value in steps[step].items():
                run.log({name: value})
    text = "no group had different rewards in the last 3 steps: the policy learned nothing"
    cut = "50 % of answers were cut at max_tokens=8" if steps[0] is NOTHING else "inspect the answers with rlkit report"
    assert [each.getMessage() for each in caplog.records] == [f"{text}; {cut}"] * warned
