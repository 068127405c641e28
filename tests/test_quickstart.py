"""The demo, end to end on the toy backend; with a real model it is `make demo`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.storage import read
from rlkit.tracking import read_metrics

for name in ("reasoning_gym", "matplotlib", "rich"):
    pytest.importorskip(name, reason="needs: pip install 'rlkit-lm[examples,reasoning-gym]'")

PROGRAM = Path(__file__).parents[1] / "examples" / "quickstart.py"


def run(*options, **variables):
    """The program in a process of its own, any warning an error."""
    command = [sys.executable, "-W", "error", str(PROGRAM), *options]
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(folder of results, what was printed) of a seeded run on the toy."""
    out = tmp_path_factory.mktemp("quickstart")
    done = run("--backend", "toy", "--steps", "20", "--eval-size", "50", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert [
        line for line in done.stderr.splitlines() if "the policy learned nothing" not in line
    ] == []  # nor in its first steps
    return out, done.stdout


@pytest.fixture(scope="module")
def quickstart():
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("quickstart", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["quickstart"]


def test_metrics(toy):
    """One line per step, standard names, finite numbers; on the toy the trainer agrees with the sampler."""
    rows = [row for row in read_metrics(toy[0]) if "train/loss" in row["metrics"]]
    assert [row["step"] for row in rows] == list(range(20))
    for name in ("env/sums/reward", "reward/cut", "train/loss", "train/grad_norm", "time/rollout", "time/train"):
        assert all(math.isfinite(row["metrics"][name]) for row in rows), name
    assert all(0 <= row["metrics"]["env/sums/reward"] <= 1 for row in rows)
    for row in rows:
        assert row["metrics"]["train/ratio/min"] == pytest.approx(1, abs=1e-5)
        assert row["metrics"]["train/ratio/max"] == pytest.approx(1, abs=1e-5)


def answers(folder, name):
    """step -> (question, reward) of every answer to the questions of that name."""
    found = {}
    for group in read(folder / "trajectories.jsonl"):
        if group.env == name:
            rows = [(t.messages[-2]["content"], t.reward) for t in group.trajectories]
            found.setdefault(group.step, []).extend(rows)
    return found


def test_trajectories(toy):
    """All completions with their rewards; no held-out question was trained on; the mean rewards are those reported."""
    train, held_out = answers(toy[0], "sums"), answers(toy[0], "held-out")
    assert [len(train[step]) for step in range(20)] == [8 * 8] * 20
    assert {step: len(rows) for step, rows in held_out.items()} == {0: 50, 20: 50}
    trained = {question for rows in train.values() for question, _ in rows}
    for rows in held_out.values():
        assert len({question for question, _ in rows}) == 50
        assert not trained & {question for question, _ in rows}
    for row in read_metrics(toy[0]):
        if "env/sums/reward" in row["metrics"]:
            rewards = [reward for _, reward in train[row["step"]]]
            assert row["metrics"]["env/sums/reward"] == pytest.approx(np.mean(rewards))


def test_it_learns(toy):
    """Greedy answers to held-out questions: the toy, which cannot read them, learns to name a number."""
    held_out = answers(toy[0], "held-out")
    before, after = (np.mean([reward for _, reward in held_out[step]]) for step in (0, 20))
    assert before <= after
    assert re.findall(r"(\S+) hold a number", toy[1]) == ["0.00", "0.00", "1.00"]
    assert f"after: {after:.2f} right (95 % interval" in toy[1]
    assert f"What it learned: {after - before:+.2f}, of which" in toy[1]


def test_picture_adapter_and_page(toy):
    assert (toy[0] / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "</html>" in (toy[0] / "report.html").read_text()
    record = rlkit.runs.records(toy[0])[-1]
    assert record.policy("policy") in toy[1].replace("\n", "")
    assert json.loads((Path(record.policy("policy")) / "state.json").read_text())["version"] == 20


def test_it_goes_on(toy, tmp_path):
    """Stopped in the middle and started again, it says the same numbers as the run that was not."""
    command = [sys.executable, "-W", "error", str(PROGRAM), "--backend", "toy", "--steps", "20", "--eval-size", "50"]
    command += ["--out", str(tmp_path)]
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line == "step 8 of 20\n":
                process.terminate()
    assert process.returncode == 143
    assert rlkit.runs.records(tmp_path)[-1].step in range(8, 20)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=True)
    assert "after step" in done.stdout
    told = [text.partition("\nHeld-out")[2].partition("since the untrained")[0] for text in (toy[1], done.stdout)]
    assert told[0]
    assert told[0] == told[1]


def test_help_lists_the_options():
    done = run("--help", COLUMNS="100")
    assert done.returncode == 0
    for option in ("--backend", "--model", "--steps", "--learning-rate", "--samples", "--seed", "--out"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--backend", "none"], "invalid choice: 'none'"),
        (["--learning-rate", "-1"], "Adam.learning_rate: got -1.0; expected"),
        (["--max-tokens", "0"], "SamplingParams.max_tokens: got 0; expected"),
        (["--rank", "0"], "Lora.rank: got 0; expected"),
    ],
)
def test_bad_options_are_named(options, message, tmp_path):
    done = run("--backend", "toy", *options, "--out", str(tmp_path / "out"))
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_named(tmp_path):
    """Without reasoning-gym it says what to install instead of a traceback."""
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError(\"No module named 'reasoning_gym'\")")
    done = run("--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "reasoning_gym" in done.stderr
    assert "pip install -e '.[all]' -c constraints.txt" in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5", 1), ("2 + 3 = 5", 1), ("5 apples, not 3", 0), ("-5", 0), ("15", 0), ("five", 0), ("", 0), ("5.", 1)],
)
def test_reward_is_on_the_last_integer(quickstart, text, expected):
    assert quickstart.right(text, "5") == expected


def test_questions_are_different_and_held_out(quickstart):
    """Of 200 sums of two one-digit terms 158 have an answer that is none of their terms; each is asked once."""
    train = quickstart.make_questions(0, 58)
    held_out = quickstart.make_questions(1, 500, without=train)
    assert len({row["prompt"] for row in train}) == 58
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in held_out)
    assert len(held_out) == len({row["prompt"] for row in held_out}) == 100
    for row in train + held_out:
        left, sign, right = row["prompt"].rpartition(": ")[2].removesuffix(" =").split()
        assert int(row["answer"]) == int(left) + int(right) * (1 if sign == "+" else -1)
        assert not {"0", row["answer"]} & {left, right}


@pytest.mark.parametrize("cut_at", range(1, 9))
def test_an_echo_of_the_question_is_not_paid(quickstart, cut_at):
    """Whatever repeats the question, in parts or whole, with words or without, earns nothing."""
    for row in quickstart.make_questions(0, 158):
        left, sign, right = row["prompt"].rpartition(": ")[2].removesuffix(" =").split()
        echoes = [
            f"{left} {sign} {right} =",
            f"The sum of {left} and {right} is",
            f"{left} {sign}",
            f"{left}{sign}{right}",
        ]
        echoes += [row["prompt"], " ".join(row["prompt"].split()[-cut_at:]), " ".join(echoes[1].split()[:cut_at])]
        paid = [text for text in echoes if quickstart.right(text, row["answer"])]
        assert paid == []
