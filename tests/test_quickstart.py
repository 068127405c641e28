"""The demo, end to end on the toy backend; with a real model it is `make demo`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.storage import read
from rlkit.tracking import read_metrics

pytest.importorskip("reasoning_gym", reason="needs: pip install 'rlkit-lm[examples,reasoning-gym]'")

PROGRAM = Path(__file__).parents[1] / "examples" / "quickstart.py"
COMMAND = [sys.executable, "-W", "error", str(PROGRAM), "--backend", "toy", "--steps", "20", "--eval-size", "50"]
QUIET = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "text": True}


def run(*options, **more):
    """The program in another process, any warning an error; later options count."""
    environment = QUIET | {"env": QUIET["env"] | more}
    return subprocess.run([*COMMAND, *options], capture_output=True, timeout=280, check=False, **environment)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(folder of results, what was printed) of a seeded run on the toy."""
    out = tmp_path_factory.mktemp("quickstart")
    done = run("--out", str(out))
    assert done.returncode == 0, done.stderr
    # nor in its first steps
    assert [line for line in done.stderr.splitlines() if "the policy learned nothing" not in line] == []
    return out, done.stdout


@pytest.fixture(scope="module")
def quickstart():
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("quickstart", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(folder, name):
    """step -> (question, answer, reward) of every answer to the questions of that name."""
    found = {}
    for group in read(folder / "trajectories.jsonl"):
        if group.env == name:
            rows = [(*(message["content"] for message in t.messages[-2:]), t.reward) for t in group.trajectories]
            found.setdefault(group.step, []).extend(rows)
    return found


def test_every_step_is_logged(toy):
    """Finite metrics under standard names, and all answers; on the toy the trainer agrees with the sampler."""
    rows = [row for row in read_metrics(toy[0]) if "train/loss" in row["metrics"]]
    trained = answers(toy[0], "sums")
    assert [row["step"] for row in rows] == sorted(trained) == list(range(20))
    for row in rows:
        metrics, rewards = row["metrics"], [reward for _, _, reward in trained[row["step"]]]
        names = ("env/sums/reward", "rollout/cut", "train/loss", "train/grad_norm", "time/rollout", "time/train")
        assert all(math.isfinite(metrics[name]) for name in names)
        assert len(rewards) == 8 * 8
        assert metrics["env/sums/reward"] == pytest.approx(np.mean(rewards))
        assert [metrics["train/ratio/min"], metrics["train/ratio/max"]] == pytest.approx([1, 1], abs=1e-5)


def test_it_learns(toy):
    """Held-out questions, none of which was trained on: the toy, which cannot read them, learns to name a number."""
    held_out = answers(toy[0], "held-out")
    assert {step: len({question for question, _, _ in rows}) for step, rows in held_out.items()} == {0: 50, 20: 50}
    trained = {question for rows in answers(toy[0], "sums").values() for question, _, _ in rows}
    assert not trained & {question for rows in held_out.values() for question, _, _ in rows}
    numbers = [np.mean([any(map(str.isdecimal, text)) for _, text, _ in held_out[step]]) for step in (0, 20)]
    assert numbers == [0, 1]
    before, after = (np.mean([reward for _, _, reward in held_out[step]]) for step in (0, 20))
    assert before <= after
    assert f"after: {after:.2f} right (95 % interval" in toy[1]
    assert f"What it learned: {after - before:+.2f}, of which" in toy[1]


def test_adapter_and_page(toy):
    assert "</html>" in (toy[0] / "report.html").read_text()
    record = rlkit.runs.records(toy[0])[-1]
    assert record.policy("policy") in toy[1]
    assert json.loads((Path(record.policy("policy")) / "state.json").read_text())["version"] == 20


def test_it_resumes(toy, tmp_path):
    """Stopped in the middle and started again, it says the same numbers as the run that was not."""
    command = [*COMMAND, "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, **QUIET) as process:
        for line in process.stdout:
            if line.split()[:1] == ["7"]:
                process.terminate()
    assert process.returncode == 143
    assert rlkit.runs.records(tmp_path)[-1].step in range(7, 20)
    done = run("--out", str(tmp_path))
    assert "after step" in done.stdout
    told = [text.partition("\nHeld-out")[2].partition("since the untrained")[0] for text in (toy[1], done.stdout)]
    assert told[0]
    assert told[0] == told[1]


def test_wrong_options_and_missing_packages_are_named(tmp_path):
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError(\"No module named 'reasoning_gym'\")")
    for options, variables, message in (
        (["--steps", "0"], {}, "--steps must be at least 1"),
        (["--learning-rate", "-1"], {}, "Adam.learning_rate: got -1.0; expected"),
        (["--rank", "0"], {}, "Lora.rank: got 0; expected"),
        (
            [],
            {"PYTHONPATH": str(tmp_path)},
            "reasoning_gym'; in rlkit's folder: pip install -e '.[all]' -c constraints",
        ),
    ):
        done = run(*options, "--out", str(tmp_path / "out"), **variables)
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists()


def test_rewards_and_questions(quickstart):
    """The last integer counts. Of 200 sums 158 have an answer that is none of their terms; each is asked once."""
    texts = {"5": 1, "2 + 3 = 5": 1, "5 apples, not 3": 0, "-5": 0, "15": 0, "five": 0, "": 0, "5.": 1}
    assert {text: quickstart.right(text, "5") for text in texts} == texts
    train = quickstart.make_questions(0, 58)
    held_out = quickstart.make_questions(1, 500, without=train)
    assert [len(rows) for rows in (train, held_out)] == [58, 100]
    assert len({row["prompt"] for row in train + held_out}) == 158
    for row in train + held_out:
        left, sign, right = row["prompt"].rpartition(": ")[2].removesuffix(" =").split()
        assert int(row["answer"]) == int(left) + int(right) * (1 if sign == "+" else -1)
        words = [*row["prompt"].split(), f"{left} {sign} {right} =", f"{left}{sign}{right}", f"The sum of {left}"]
        echoes = [row["prompt"], *words, *(" ".join(row["prompt"].split()[-n:]) for n in range(1, 9))]
        assert not any(quickstart.right(text, row["answer"]) for text in echoes)
