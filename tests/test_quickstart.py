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
    assert done.stderr == ""
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


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics(toy):
    """One line per step, standard names, finite numbers; on the toy the trainer agrees with the sampler."""
    rows = lines(toy[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(20))
    for name in ("reward/mean", "train/loss", "train/grad_norm", "time/sample", "time/train"):
        assert all(math.isfinite(row[name]) for row in rows), name
    assert all(0 <= row["reward/mean"] <= 1 for row in rows)
    assert max(row["train/sampler_gap"] for row in rows) < 1e-5


def test_trajectories(toy):
    """All completions with their rewards; no held-out question was trained on; the mean rewards are those reported."""
    found = lines(toy[0] / "trajectories.jsonl")
    train = [line for line in found if line["split"] == "train"]
    held_out = [line for line in found if line["split"] == "held-out"]
    assert (len(train), len(held_out)) == (20 * 8 * 8, 2 * 50)
    assert not {line["question"] for line in train} & {line["question"] for line in held_out}
    assert len({line["question"] for line in held_out}) == 50
    for row in lines(toy[0] / "metrics.jsonl"):
        rewards = [line["reward"] for line in train if line["step"] == row["step"]]
        assert row["reward/mean"] == pytest.approx(np.mean(rewards))


def test_it_learns(toy):
    """Greedy answers to held-out questions: none right at first, some afterwards."""
    held_out = [line for line in lines(toy[0] / "trajectories.jsonl") if line["split"] == "held-out"]
    before, after = (np.mean([line["reward"] for line in held_out if line["step"] == step]) for step in (0, 20))
    assert before <= after
    assert after > 0
    assert f"after: {after:.2f} right (95 % interval" in toy[1]
    assert f"What it learned: {after - before:+.2f}, of which" in toy[1]


def test_picture_and_adapter(toy):
    assert (toy[0] / "reward.png").read_bytes().startswith(b"\x89PNG")
    (adapter,) = [path for path in toy[0].iterdir() if path.is_dir()]
    assert str(adapter) in toy[1].replace("\n", "")
    assert json.loads((adapter / "state.json").read_text())["version"] == 20


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
    assert "pip install 'rlkit-lm[local,gguf,examples,reasoning-gym]'" in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5", 1), ("2 + 3 = 5", 1), ("5 apples, not 3", 0), ("-5", 0), ("15", 0), ("five", 0), ("", 0), ("5.", 1)],
)
def test_reward_is_on_the_last_integer(quickstart, text, expected):
    import rlkit

    policy = rlkit.connect("toy", seed=0)
    question = quickstart.Question("2 + 3 = ", policy.tokenizer.encode("2 + 3 = "), "5")

    class Says:
        """A sampler that says one thing."""

        tokenizer = policy.tokenizer

        def sample(self, prompt, params, n):
            tokens = self.tokenizer.encode(text)
            return rlkit.Future.of([rlkit.Sample(prompt, tokens, np.zeros(tokens.size))] * n)

    got = quickstart.ask(Says(), [question], rlkit.SamplingParams(), n=2)
    assert got.rewards.tolist() == [[expected, expected]]
    assert got.numbers.tolist() == [[int(any(c.isdigit() for c in text))] * 2]


def test_interval(quickstart):
    """Wilson's interval for 5 of 10 is 0.2366 to 0.7634, for 0 of 10 it is 0 to 0.2775."""
    answers = quickstart.Answers([], [], np.zeros(1), np.array([[1.0]] * 5 + [[0.0]] * 5))
    assert answers.interval() == pytest.approx((0.5, 0.2366, 0.7634), abs=5e-5)
    answers = quickstart.Answers([], [], np.zeros(1), np.zeros((10, 1)))
    assert answers.interval() == pytest.approx((0.0, 0.0, 0.2775), abs=5e-5)


def test_questions_are_different_and_held_out(quickstart):
    """There are 200 sums of two one-digit terms; each is asked once, and none of those to be left out."""
    import rlkit

    tokenizer = rlkit.connect("toy").tokenizer
    train = quickstart.make_questions(tokenizer, 0, 100)
    held_out = quickstart.make_questions(tokenizer, 1, 500, without=train)
    assert len({question.text for question in train}) == 100
    assert {question.text for question in train}.isdisjoint(question.text for question in held_out)
    assert len(held_out) == len({question.text for question in held_out}) == 100
    for question in train:
        left, sign, right = question.text.rpartition(": ")[2].removesuffix(" =").split()
        assert int(question.answer) == int(left) + int(right) * (1 if sign == "+" else -1)
