"""A run that is killed and run again is bit for bit the run that was not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.runs import records
from rlkit.storage import read
from tests.models.build import build
from tests.runs import ahead_loop
from tests.runs.ahead_loop import MAX_LAG, train

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


def killed(folder, **settings):
    """Run the program in a process of its own, and kill it where it hangs."""
    command = [sys.executable, "-m", "tests.runs.ahead_loop", str(folder), json.dumps(settings)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline().strip()
        process.kill()
        assert line == "here", process.stderr.read()
    assert process.returncode == -9


def rows(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "norm", "drawn", "lag", "rate", "base")
    return [(line["step"], *(line["metrics"][name] for name in names)) for line in lines if "drawn" in line["metrics"]]


@pytest.mark.parametrize(
    ("settings", "kills"),
    [
        ({"interval": 1}, [(0, "asked"), (3, "trained")]),
        ({"interval": 2}, [(1, "saved"), (4, "asked")]),
        ({"interval": 3, "every": 2}, [(2, "trained")]),
        ({"interval": 2, "backend": "local", "device": "cpu"}, [(2, "trained")]),
    ],
)
def test_snapshots_go_on_to_the_bit(tmp_path, settings, kills):
    """Killed with SIGKILL anywhere, with or without a snapshot at every step: the same curve, the same weights."""
    settings = {"steps": 6, **settings}
    if "backend" in settings:
        settings["model"] = str(build("llama", tmp_path / "model"))
    expected = train(tmp_path / "whole", **settings)
    for hang in kills:
        killed(tmp_path / "parts", **settings, hang=hang)
    assert train(tmp_path / "parts", **settings) == expected
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert len(rows(tmp_path / "parts")) == 6


def test_a_service_goes_on_to_the_bit(tmp_path, monkeypatch):
    """The checkpoints hold its paths; spent ones are removed there."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from rlkit.testing import FakeTinker

    def stop():
        raise InterruptedError

    monkeypatch.setattr(ahead_loop, "hang_here", stop)
    with FakeTinker(seed=0) as fake:
        settings = {"steps": 6, "backend": "tinker", "model": "toy", "base_url": fake.base_url, "api_key": fake.api_key}
        expected = train(tmp_path / "whole", last=2, **settings)
        for hang in ((1, "trained"), (4, "asked")):
            with pytest.raises(InterruptedError):
                train(tmp_path / "parts", last=2, **settings, hang=hang)
        assert train(tmp_path / "parts", last=2, **settings) == expected
        assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
        assert len(fake.rest_client().list_user_checkpoints().result().checkpoints) <= 2 * 2 + 2


def test_in_flight_nothing_is_lost(tmp_path):
    """Each task of each step is trained on once, no token is too old, and its logprob is that of its version."""
    settings = {"steps": 7, "in_flight": True}
    for hang in ((1, "trained"), (3, "saved"), (5, "asked")):
        killed(tmp_path / "run", **settings, hang=hang)
    train(tmp_path / "run", **settings)
    train(tmp_path / "whole", steps=7)  # with snapshots
    groups, expected = (list(read(tmp_path / name / "trajectories.jsonl")) for name in ("run", "whole"))
    tasks = [
        [(group.step, group.number, group.index, len(group.trajectories)) for group in x] for x in (groups, expected)
    ]
    assert tasks[0] == tasks[1]
    frozen = {0: rlkit.connect("toy", seed=0).sampler().result()}
    for record in records(tmp_path / "run"):
        frozen[record.step] = rlkit.sampler("toy", path=record.policy("policy"))  # a step a version
    for group in groups:
        for turn in (turn for trajectory in group.trajectories for turn in trajectory.turns):
            versions = turn.sample.token_versions
            assert group.step - MAX_LAG <= versions.min() <= versions.max() <= group.step
            text = np.concatenate([turn.prompt, turn.tokens])
            for version in {*versions.tolist()}:
                own, at = versions == version, turn.prompt.size
                theirs = frozen[version].logprobs(text).result()[at:]
                np.testing.assert_array_equal(turn.logprobs[own], theirs[own])
