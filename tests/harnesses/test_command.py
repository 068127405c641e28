"""``harnesses.evaluate`` with programs that stand for the harnesses; tests/install/harnesses.py has the real ones."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit import harnesses
from tests.each import for_each

pytest.importorskip("starlette", reason="needs the extra gateway")
pytest.importorskip("uvicorn", reason="needs the extra gateway")

FAKE = Path(__file__).with_name("fake.py")


@pytest.fixture
def python(tmp_path):
    """An interpreter that has both harnesses."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def evaluate(tmp_path, python):
    with rlkit.sampler("toy") as sampler:

        def call(task, harness="lm-eval", **options):
            options = {"folder": tmp_path / "run", "python": python, **options}
            return harnesses.evaluate(harness, sampler, [task], **options)

        call.sampler = sampler
        yield call


def test_scores_are_returned_and_kept(evaluate, tmp_path):
    """The logprob is that of the policy, which the fake asked for."""
    result = evaluate("small", arguments=[("limit", "100")], step=2)
    logprob = float(evaluate.sampler.logprobs(list(b"Hi!")).result()[1:].sum())
    scores = {score.metric: (score.value, score.stderr, score.samples) for score in result.scores}
    assert scores.keys() == {"acc", "logprob", "exact_match,strict-match"}
    assert scores["acc"] == (0.5, 0.05, 100)
    assert scores["logprob"] == (pytest.approx(logprob, abs=1e-5), None, 100)
    assert (result.metrics["eval/small/acc"], result.metrics["eval/small/acc_stderr"]) == (0.5, 0.05)
    assert np.isclose(result.metrics["eval/small/logprob"], logprob, atol=1e-5)
    assert "eval/small/logprob_stderr" not in result.metrics
    assert result.folder.parent == tmp_path / "run" / "harness"
    arguments = json.loads((result.folder / "policy" / "results_2026-01-01T00-00-00.json").read_text())["arguments"]
    assert "--limit=100" in arguments
    assert (result.folder / "output.log").read_text() == "fake lm-eval on small\n"
    assert evaluate("quiz.py@quiz", "inspect", step=1).scores[0].name == "eval/quiz/match/accuracy"
    assert [(found.step, found.version) for found in harnesses.results(tmp_path / "run")] == [
        (1, "1.2.3"),
        (2, "1.2.3"),
    ]


@for_each(
    ("task", "message"),
    [
        ("dies", "lm-eval ended with status 1: no such task"),
        ("silent", "lm-eval ended with status 3"),
        ("killed", "lm-eval ended with signal 9"),
        ("nothing", "lm-eval wrote no results"),
        ("nonsense", "is not valid JSON"),
        ("empty", "has no score"),
    ],
)
def test_harnesses_that_fail(evaluate, tmp_path, task, message):
    """There is no score, and what the harness printed is kept."""
    with pytest.raises(rlkit.EnvError, match=message):
        evaluate(task, folder=tmp_path / task)
    assert harnesses.results(tmp_path / task) == []
    (log,) = (tmp_path / task).glob("harness/*/output.log")
    assert log.read_text("utf-8", "replace").startswith(f"fake lm-eval on {task}")


def test_a_task_that_fails_in_inspect(evaluate):
    with pytest.raises(rlkit.EnvError, match="the task fails ended as 'error': out of questions"):
        evaluate("quiz.py@fails", "inspect")


def test_the_deadline(evaluate, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    with pytest.raises(rlkit.EnvError, match="lm-eval did not end within 5 s"):
        evaluate("hangs", deadline=5)
    assert_gone(tmp_path / "pids")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_ctrl_c(python, tmp_path, number, status):
    """The harness and what it started end with the program."""
    pids = tmp_path / "pids"
    program = (
        "import rlkit, sys; from rlkit import harnesses; sampler = rlkit.sampler('toy')\n"
        "harnesses.evaluate('lm-eval', sampler, ['hangs'], folder=sys.argv[1], python=sys.argv[2])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run"), python]
    environment = os.environ | {"FAKE_PIDS": str(pids)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        began = time.monotonic()
        while not (pids.exists() and len(pids.read_text().split()) == 2):
            assert process.poll() is None
            assert time.monotonic() - began < 120
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == status
    assert_gone(pids)


def assert_gone(pids):
    for pid in pids.read_text().split():
        for _ in range(1000):
            try:
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X"):
                    break
            except FileNotFoundError:
                break
            time.sleep(0.01)
        else:
            raise AssertionError(pid)


@for_each(
    ("harness", "options", "message"),
    [
        ("lm-eval", {"python": None}, r"-m pip install 'lm_eval\[api\]'"),
        ("inspect", {"python": None}, "-m pip install inspect-ai openai"),
        ("lm_eval", {}, "unknown harness 'lm_eval'; did you mean 'lm-eval'"),
        ("lm-eval", {"python": "/no/python"}, "/no/python: cannot be run"),
        ("lm-eval", {"arguments": [("model", "hf")]}, "argument model: is 'hf'"),
    ],
)
def test_wrong_arguments(evaluate, tmp_path, harness, options, message):
    """Refused before anything is run or made."""
    with pytest.raises(rlkit.errors.RlkitError, match=message):
        evaluate("small", harness, **options)
    assert not (tmp_path / "run" / "harness").exists()
