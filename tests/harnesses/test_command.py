"""``rlkit eval --harness`` with programs that stand for the harnesses; tests/install/harnesses.py has the real ones."""

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
from rlkit import cli, harnesses
from rlkit.tracking import read_metrics

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
def run(tmp_path):
    """A run with checkpoints of steps 1 and 2."""
    with rlkit.Run(tmp_path / "run", seed=0, retention=rlkit.runs.Retention(last=9)) as run:
        policy = run.connect("toy")
        datum = rlkit.Datum.supervised(policy.tokenizer.encode("Hi"), list(b"!"))
        for _ in run.steps(2):
            policy.forward_backward([datum], "cross_entropy")
            run.log(policy.optim_step(rlkit.Adam(learning_rate=0.5)).result())
            run.checkpoint(policy)
    return str(tmp_path / "run")


def evaluated(run, python, tasks, *words, harness="lm-eval"):
    return cli.main(["eval", run, "--harness", harness, "--tasks", tasks, "--python", python, *words])


def test_scores_are_printed_kept_and_shown(run, python, capfd):
    """At the checkpoint's step; the logprob is that of the checkpoint's policy, which the fake asked for."""
    assert evaluated(run, python, "small", "--harness-arg", "limit=100") == 0
    captured = capfd.readouterr()
    assert "fake lm-eval on small" in captured.err
    with rlkit.runs.sampler(run) as sampler:
        logprob = float(sampler.logprobs(list(b"Hi!")).result()[1:].sum())
    lines = captured.out.splitlines()
    assert lines[0] == "small: acc 0.5 (stderr 0.05)  100 samples"
    assert lines[1] == f"small: logprob {logprob:.4g}  100 samples"
    assert lines[2] == "small: exact_match,strict-match 0.25 (stderr 0.04)  100 samples"
    folder = Path(lines[3].rpartition(" in ")[2])
    assert folder.parent == Path(run).absolute() / "harness"
    arguments = json.loads((folder / "policy" / "results_2026-01-01T00-00-00.json").read_text())["arguments"]
    assert "--limit=100" in arguments
    assert (folder / "output.log").read_text() == "fake lm-eval on small\n"

    (row,) = [row for row in read_metrics(run) if "eval/small/acc" in row["metrics"]]
    assert row["step"] == 2
    assert (row["metrics"]["eval/small/acc"], row["metrics"]["eval/small/acc_stderr"]) == (0.5, 0.05)
    assert np.isclose(row["metrics"]["eval/small/logprob"], logprob, atol=1e-5)
    assert "eval/small/logprob_stderr" not in row["metrics"]
    (result,) = harnesses.results(run)
    assert (result.harness, result.version, result.step, result.folder) == ("lm-eval", "1.2.3", 2, folder)


def test_an_older_checkpoint_and_a_run_that_went_on(run, python, capfd):
    """``--step``; what a run that goes on drops from its metrics stays in its folder."""
    assert evaluated(run, python, "small", "--step", "1") == 0
    assert evaluated(run, python, "quiz.py@quiz", harness="inspect") == 0
    assert "quiz/match: accuracy 0.75 (stderr 0.1)  4 samples\n" in capfd.readouterr().out
    assert [result.step for result in harnesses.results(run)] == [1, 2]
    assert [row["step"] for row in read_metrics(run) if "eval/small/acc" in row["metrics"]] == [1]
    with rlkit.Run(run, seed=0) as again:
        again.connect("toy")
        assert again.step == 2
    assert [result.step for result in harnesses.results(run)] == [1, 2]


def test_what_is_no_run(python, tmp_path, capfd, monkeypatch):
    """A model's scores are kept where ``--out`` says, at step 0."""
    words = ["--backend", "toy", "--out", str(tmp_path / "out")]
    assert evaluated("toy", python, "small", *words) == 0
    assert read_metrics(tmp_path / "out")[0]["step"] == 0
    monkeypatch.chdir(tmp_path)
    assert evaluated("toy", python, "small", "--backend", "toy") == 0
    assert str(tmp_path / "rlkit-evals" / "harness") in capfd.readouterr().out


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("dies", "lm-eval ended with status 1: no such task"),
        ("silent", "lm-eval ended with status 3"),
        ("killed", "lm-eval ended with signal 9"),
        ("nothing", "lm-eval wrote no results"),
        ("nonsense", "is not valid JSON"),
        ("empty", "has no score"),
    ],
)
def test_harnesses_that_fail(run, python, capfd, task, words):
    """One line and status 2; the run has no score, and what was said is kept."""
    before = read_metrics(run)
    assert evaluated(run, python, task) == 2
    captured = capfd.readouterr()
    assert words in captured.err.splitlines()[-1]
    assert captured.out == ""
    assert read_metrics(run) == before
    assert harnesses.results(run) == []
    (log,) = Path(run).glob("harness/*/output.log")
    assert log.read_text("utf-8", "replace").startswith(f"fake lm-eval on {task}")


def test_a_task_that_fails_in_inspect(run, python, capfd):
    assert evaluated(run, python, "quiz.py@fails", harness="inspect") == 2
    assert "the task fails ended as 'error': out of questions" in capfd.readouterr().err


def test_the_deadline(run, python, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    assert evaluated(run, python, "hangs", "--deadline", "5") == 2
    assert "lm-eval did not end within 5 s" in capfd.readouterr().err
    assert_gone(tmp_path / "pids")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c(run, python, tmp_path, number, status):
    """The harness and what it started end with the command, in order: the gateway is closed, nothing is left."""
    pids = tmp_path / "pids"
    words = ["eval", run, "--harness", "lm-eval", "--tasks", "hangs", "--python", python]
    environment = os.environ | {"FAKE_PIDS": str(pids)}
    command = [sys.executable, "-m", "rlkit.cli", *words]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        began = time.monotonic()
        while not (pids.exists() and len(pids.read_text().split()) == 2):
            assert process.poll() is None
            assert time.monotonic() - began < 120
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == status
    assert "Traceback" not in said
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--harness", "lm-eval", "--tasks", "a"], "-m pip install 'lm_eval[api]'"),
        (["--harness", "inspect", "--tasks", "a"], "-m pip install inspect-ai openai"),
        (["--harness", "lm_eval", "--tasks", "a"], "unknown harness 'lm_eval'; did you mean 'lm-eval'?"),
        (["--harness", "lm-eval"], "--tasks: is missing; expected A,B"),
        (["--harness", "lm-eval", "--tasks", ","], "--tasks: is missing; expected A,B"),
        (["--harness", "lm-eval", "--tasks", "a", "b"], "TASKS: are b; expected --tasks A,B"),
        (["--harness", "lm-eval", "--tasks", "a", "-n", "3"], "-n does not apply to --harness lm-eval"),
        (
            ["--harness", "lm-eval", "--tasks", "a", "--max-tokens", "3"],
            "--max-tokens does not apply to --harness lm-eval",
        ),
        (["--harness", "lm-eval", "--tasks", "a", "--harness-arg", "x"], "--harness-arg: is 'x'; expected KEY=VALUE"),
        (["--harness", "lm-eval", "--tasks", "a", "--python", "/no/python"], "--python /no/python: cannot be run"),
        (["chain_sum", "--tasks", "a"], "--tasks requires --harness NAME"),
        (["chain_sum", "--deadline", "3"], "--deadline requires --harness NAME"),
    ],
)
def test_wrong_command_lines(words, message, capsys):
    """Said in one line, before a policy is opened."""
    assert cli.main(["eval", "toy", "--backend", "toy", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlkit eval: ")
    assert message in error
    assert error.count("\n") == 1


def test_options_of_the_harness_that_are_rlkit_s(run, python, capfd):
    """Refused before anything is run or made."""
    assert evaluated(run, python, "small", "--harness-arg", "model=hf") == 2
    assert "--harness-arg model: is 'hf'" in capfd.readouterr().err
    assert not (Path(run) / "harness").exists()
