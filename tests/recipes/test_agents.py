"""Agents by name: in a configuration as any other environment, trained and evaluated."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")
pytest.importorskip("jinja2")
pytest.importorskip("uvicorn", reason="needs the extra gateway")

import rlkit
from rlkit import recipes
from rlkit.gateway import Request
from rlkit.recipes import tasks
from rlkit.recipes.settings import ExplorerInput, Taskset
from rlkit.tracking import read_metrics

PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}], "model": "any"}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""


async def first_words(task, session):
    """Asked twice, of which the second is a branch."""
    for text in ("Plan.", task["prompt"]):
        reply = await session.answer(Request(messages=[{"role": "user", "content": text}]))
    return reply.choices[0].content


@tasks.rewards.register("digits_of_agents")
def digits(action, answer):
    return sum(c.isdigit() for c in action) / 6


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "response": "1"}) + "\n" for text in ("Call ", "Dial ")))
    return path


def run(folder, rows, algorithm="grpo", steps=2, **args):
    """The metrics of a run from settings."""
    settings = {
        "checkpoint_root_dir": str(folder),
        "backend": "toy",
        "seed": 0,
        "algorithm": {"algorithm_type": algorithm, "repeat_times": 4, "optimizer": {"lr": 0.05}},
        "model": {"max_response_tokens": 6},
        "buffer": {
            "batch_size": 2,
            "total_steps": steps,
            "explorer_input": {
                "taskset": {
                    "name": "agents",
                    "path": str(rows),
                    "default_workflow_type": "agent",
                    "default_reward_fn_type": "digits_of_agents",
                    "workflow_args": args,
                }
            },
        },
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(settings))
    (outcome,) = recipes.run(recipes.load(path))
    return [row["metrics"] for row in read_metrics(outcome.folder) if "env/agents/turns" in row["metrics"]]


@pytest.mark.parametrize("algorithm", ["grpo", "gigpo", "remax", "ppo"])
def test_a_function_trains(tmp_path, rows, algorithm):
    """Branches and all, for every algorithm whose loss is elementwise, with a critic too."""
    metrics = run(tmp_path, rows, algorithm, run="tests.recipes.test_agents:first_words")
    assert [row["env/agents/turns"] for row in metrics] == [2.0, 2.0]
    assert [row["env/agents/failed"] for row in metrics] == [0.0, 0.0]


def test_a_program_trains(tmp_path, rows):
    (tmp_path / "agent.py").write_text(PROGRAM)
    (row,) = run(tmp_path, rows, steps=1, run=[sys.executable, str(tmp_path / "agent.py")], credit="last")
    assert row["env/agents/turns"] == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, r"^tasks.workflow_args.run: is None"),
        ({"run": "no_such:thing"}, r"^tasks.workflow_args.run: 'no_such:thing' cannot be imported"),
        ({"run": "no-such-program {prompt}"}, r"^tasks: run: the command 'no-such-program' is not on the PATH"),
        ({"run": ["true"], "credits": "last"}, r"^tasks: .*unexpected keyword argument 'credits'"),
    ],
)
def test_mistakes_are_named(rows, args, message):
    given = Taskset(path=str(rows), default_workflow_type="agent", workflow_args=args)
    with pytest.raises(rlkit.ConfigError, match=message):
        tasks.make_tasks(given, ExplorerInput(), "tasks")


def test_a_command_in_one_text(rows):
    given = Taskset(
        name="a", path=str(rows), default_workflow_type="agent", workflow_args={"run": "echo 'a b' {prompt}"}
    )
    made = tasks.make_tasks(given, ExplorerInput(), "tasks")
    assert (len(made), made.name) == (2, "a")
