"""The command ``rlkit eval``."""

from __future__ import annotations

import json
import sys

import pytest

import rlkit
from rlkit import recipes
from rlkit.cli import main
from rlkit.runs import Run
from rlkit.storage import read
from rlkit.tracking import read_metrics
from tests.each import for_each

pytest.importorskip("omegaconf", reason="needs the extra config")

SHORT = ["--reward", "contains", "--max-tokens", "8"]


@pytest.fixture
def rows(tmp_path):
    """Three questions whose answer is in every text, and one whose answer is in none of eight bytes."""
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"prompt": "Say", "answer": "" if i else "never" * 9}) + "\n" for i in range(4)))
    return str(path)


def test_scores_of_a_file(rows, capsys, tmp_path, monkeypatch):
    """Wilson's interval of 3 of 4 is 0.3006 to 0.9544; without ``--out`` nothing is written."""
    monkeypatch.chdir(tmp_path)
    before, out = sorted(tmp_path.rglob("*")), tmp_path / "kept"
    assert main(["eval", "toy", rows, "--backend", "toy", "--greedy", *SHORT]) == 0
    told = capsys.readouterr().out
    assert told == "some: mean 0.750 (95 % interval 0.301 to 0.954)  4 tasks, 4 episodes, 0 failed\n"
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["eval", "toy", rows, "--backend", "toy", "-n", "3", "-k", "1", "3", "--out", str(out), *SHORT]) == 0
    assert "pass@1 0.750  pass@3 0.750  4 tasks, 12 episodes" in capsys.readouterr().out
    assert read_metrics(out)[0]["metrics"]["eval/mean"] == 0.75
    assert sum(len(group.trajectories) for group in read(out / "trajectories.jsonl")) == 12


def test_checkpoints_and_saved_paths(capsys, tmp_path):
    """A run's newest checkpoint, an older one, and the path of a policy: those, and no other."""
    prompt = rlkit.connect("toy").tokenizer.apply_chat_template([{"role": "user", "content": "Say"}])
    data = [rlkit.Datum.supervised(prompt, list(b"yes"))]
    with Run(tmp_path / "run", seed=0, retention=rlkit.runs.Retention(last=9), trackers=()) as run:
        policy = run.connect("toy")
        for _ in run.steps(2):
            for _ in range(60 * run.step):  # the first step teaches nothing
                policy.forward_backward(data, "cross_entropy")
                policy.optim_step(rlkit.Adam(learning_rate=0.5)).result()
            record = run.checkpoint(policy)
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"prompt": "Say", "answer": "yes"}) + "\n")
    folder, means = str(tmp_path / "run"), []
    for words in ([folder], [folder, "--step", "1"], [record.policy("policy")]):
        assert main(["eval", *words, str(asked), "--greedy", *SHORT]) == 0
        means.append(capsys.readouterr().out.split()[2])
    assert means == ["1.000", "0.000", "1.000"]
    assert main(["eval", folder, str(asked), "--step", "9"]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


def test_generated_tasks(capsys):
    pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")
    options = ["--backend", "toy", "--size", "3", "--set", "min_terms=2", "--set", "max_terms=2", "--max-tokens", "4"]
    assert main(["eval", "toy", "chain_sum", *options]) == 0
    told = capsys.readouterr().out
    assert told.startswith("chain_sum: mean 0.0")
    assert told.endswith("3 tasks, 3 episodes, 0 failed\n")


def test_a_module_of_ones_own(tmp_path, monkeypatch, capsys):
    """``--import`` brings environments, by their name, and rewards of rows; ``--set`` reaches the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "own_tasks.py").write_text(
        "from rlkit import envs, recipes\n\n\n@recipes.environments.register('empties')\n"
        "def empties(taskset):\n    return made(taskset.name, **taskset.workflow_args)\n\n\n"
        "def made(name, reward):\n    return envs.function(['a', 'b'], lambda a: reward, name=name)\n\n\n"
        "@recipes.rewards.register('quarter')\ndef quarter(action, answer):\n    return 0.25\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n', "utf-8")
    words = ["eval", "toy", "--backend", "toy", "--max-tokens", "2", "--import", "own_tasks"]
    try:
        assert main([*words, "empties", "rows.jsonl", "--set", "reward=0.5", "--reward", "quarter"]) == 0
        told = capsys.readouterr().out.splitlines()
        assert [line.partition(" (")[0] for line in told] == ["empties: mean 0.500", "rows: mean 0.250"]
        assert main([*words, "empties", "--set", "rewards=1"]) == 2
        assert "TASKS: made() got an unexpected keyword argument 'rewards'" in capsys.readouterr().err
    finally:
        recipes.environments.pop("empties", None)
        recipes.rewards.pop("quarter", None)
    assert main([*words, "empties", "--import", "own_tasks.further"]) == 2
    assert "--import own_tasks.further: no such module" in capsys.readouterr().err


@for_each(
    ("words", "message"),
    [
        ("nothing.jsonl", "a file that exists"),
        ("no_such_task", "no_such_task"),
        ("chain_sum --set min_trems=2", "min_trems"),
        ("chain_sum --set min_terms", "KEY=VALUE"),
        ("chain_sum --size 0", "--size"),
        ("chain_sum -n 2 --greedy", "expected 1"),
        ("chain_sum -k 2", "k: got 2"),
        ("chain_sum --max-tokens 0", "max_tokens"),
        ("chain_sum --reward x", "--reward: is 'x'; expected a file of rows to score"),
        ("ROWS --set size=3", "--set: is 'size=3'; expected for files, prompt_key or response_key"),
        ("ROWS --tokenizer x", "no option 'tokenizer'"),
    ],
)
def test_mistakes(rows, capsys, words, message):
    pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")
    assert main(["eval", "toy", "--backend", "toy", *words.replace("ROWS", rows).split()]) == 2
    assert message in capsys.readouterr().err
