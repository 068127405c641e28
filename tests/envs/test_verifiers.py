"""Environments and harnesses of verifiers 0.4, as they are, in an interpreter of their own.

python -m venv /tmp/verifiers && /tmp/verifiers/bin/python -m pip install verifiers==0.4.0 uv
RLKIT_VERIFIERS_PYTHON=/tmp/verifiers/bin/python python -m pytest tests/envs/test_verifiers.py
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.backends.toy import ByteTokenizer
from rlkit.chat import Chat
from rlkit.envs import verifiers
from rlkit.envs._from_verifiers import Worker
from rlkit.rollouts import rollout_sync
from rlkit.trajectory import datums
from tests.each import for_each
from tests.envs.parts import tool_call
from tests.gateway.parts import Scripted
from tests.models.build import build
from tests.test_process import gone

FOLDER = Path(__file__).with_name("verifiers_tasksets")
PYTHON = os.environ.get("RLKIT_VERIFIERS_PYTHON", "")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="RLKIT_VERIFIERS_PYTHON names no interpreter with verifiers; see above"),
]


@functools.cache
def tasks(taskset, harness=None, **more):
    """One process for each environment, which all tests use."""
    return verifiers(taskset, harness=harness, python=PYTHON, folder=FOLDER, **more)


def played(environment, said, *, n=1, index=0, **options):
    """The groups of one task, against a policy that says what it is told to."""
    sampler = Scripted(ByteTokenizer(), said)
    chat = Chat(sampler.tokenizer, tool_format="hermes")
    params = rlkit.SamplingParams(max_tokens=300)
    return rollout_sync(sampler, [environment[index]], n=n, params=params, chat=chat, progress=False, **options)


def one(groups):
    ((trajectory,),) = (group.trajectories for group in groups)
    return trajectory


def test_one_turn():
    """The reward is verifiers' weighted sum; its rewards and metrics are in the turn's metrics."""
    trajectory = one(played(tasks("vf_sums", "null"), ["It is 2."], index=1))
    assert (trajectory.reward, trajectory.ended, trajectory.tags["answer"]) == (2.0, "terminated", "2")
    assert trajectory.turns[-1].metrics == {"letters": 8.0, "reward/right": 2.0, "branches": 1}
    assert [m["content"] for m in trajectory.messages] == ["1 + 1 =", "It is 2."]
    assert one(played(tasks("vf_sums", "null"), ["It is 3."], index=1)).reward == 0.0


def test_several_turns():
    """An environment whose game is the user; its own limit of turns truncates."""
    for last, reward, ended in (("3", 1.0, "terminated"), ("4", 0.0, "truncated")):
        trajectory = one(played(tasks("vf_guess"), ["1", "2", last]))
        assert (trajectory.reward, trajectory.ended, len(trajectory.turns)) == (reward, ended, 3)
        assert len(datums(trajectory)) == 1, "one conversation, one datum"


def test_tools():
    """A taskset's server of tools; their schemas are in the prompt, their results in the conversation."""
    trajectory = one(played(tasks("vf_stock", "null"), [tool_call("stock", fruit="pears"), "There are 5."]))
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 2)
    assert trajectory.turns[-1].metrics["tools"] == 1.0
    assert "Says how many pieces of a fruit there are." in str(trajectory.messages[0]["content"])
    assert "5" in str(next(m for m in trajectory.messages if m["role"] == "tool")["content"])


def test_a_coding_harness():
    """verifiers' own shell agent; the reward reads what it wrote."""
    trajectory = one(played(tasks("vf_file", "bash"), [tool_call("bash", command="echo 42 > answer.txt"), "Done."]))
    assert (trajectory.reward, trajectory.ended, len(trajectory.turns)) == (1.0, "terminated", 2)


@pytest.fixture(params=["toy", "local", "tinker"])
def policy(request, tmp_path):
    with contextlib.ExitStack() as stack:
        if request.param == "tinker":
            pytest.importorskip("tinker", reason="needs the extra tinker")
            from rlkit.server._models import toy_models
            from rlkit.testing import FakeTinker

            fake = stack.enter_context(FakeTinker(seed=0, models=toy_models(max_length=8192)))
            options = {"model": "toy", "base_url": fake.base_url, "api_key": fake.api_key}
        elif request.param == "local":
            pytest.importorskip("peft")
            path = str(build("llama", tmp_path, max_length=8192))
            options = {"model": path, "lora": rlkit.Lora(rank=2), "seed": 0}
        else:
            options = {"seed": 0, "max_length": 8192}
        yield stack.enter_context(rlkit.connect(request.param, **options))


KINDS = {"vf_sums": "null", "vf_guess": None, "vf_stock": "null", "vf_file": "bash"}


def test_training(policy):
    """Of all four, at once: rollouts, datums of exactly what was sampled, a step of the optimizer."""
    chat = Chat(policy.tokenizer, tool_format="hermes")
    params = rlkit.SamplingParams(max_tokens=6)
    firsts = [tasks(*kind)[0] for kind in KINDS.items()]
    with policy.sampler().result() as sampler:
        groups = rollout_sync(sampler, firsts, n=2, params=params, chat=chat, progress=False, max_turns=3)
    assert [group.env for group in groups] == list(KINDS)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert len(trajectories) == 8
    data = [datum for i, t in enumerate(trajectories) for datum in datums(t, (-1.0) ** i, split="allow")]
    tokens = sum(turn.tokens.size for t in trajectories for turn in t.turns)
    assert sum(int(datum.mask.sum()) for datum in data) == tokens
    loss = policy.forward_backward(data, "ppo")
    policy.optim_step(rlkit.Adam(learning_rate=1e-3)).result()
    assert np.isfinite(loss.result().metrics["loss:sum"])


def test_a_limit_of_the_rollout_truncates():
    """The harness is refused further answers; the episode is cut, not failed."""
    trajectory = one(played(tasks("vf_guess"), ["1", "2", "3"], max_turns=1))
    assert (trajectory.ended, len(trajectory.turns)) == ("max_turns", 1)


def test_faults_are_counted_and_not_trained():
    """A reward that raises; the others of the group stay."""
    groups = played(tasks("vf_sums", "null"), ["It is 0.", "crash", "It is 0."], n=3, min_n=2)
    assert groups.metrics["env/vf_sums/failed/AgentError"] == 1
    assert groups[0].rewards.tolist() == [2.0, 2.0]
    assert "ValueError: the calculator is gone" in groups[0].failures[0].message


def test_a_process_that_is_killed():
    """What is under way fails; the next episode has another process."""
    environment = verifiers("vf_sums", harness="null", python=PYTHON, folder=FOLDER, name="killed")
    worker = environment[0].make()._worker
    asked = threading.Event()

    def say(prompt):
        asked.set()
        time.sleep(1.0)
        return "It is 0."

    def kill():
        asked.wait(120)
        os.kill(worker.child.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(rlkit.BackendError, match="1 AgentError in play; .* the process was lost"):
        played(environment, say)
    killer.join()
    assert one(played(environment, ["It is 0."])).reward == 2.0


def test_an_episode_that_is_given_up():
    """Its deadline, while the policy is asked: truncated or failed, and the process goes on."""
    environment = tasks("vf_guess")
    with pytest.raises(rlkit.BackendError):
        played(environment, lambda prompt: time.sleep(3.0) or "1", deadline=1.0)
    assert one(played(environment, ["3"])).reward == 1.0


@for_each(
    ("arguments", "match"),
    [
        ({"taskset": "no_such_taskset"}, "taskset 'no_such_taskset' not found"),
        ({"taskset": "vf_sums", "harness": "no_such_harness"}, "harness 'no_such_harness' not found"),
        ({"taskset": "vf_sums", "config": {"agent": {"max_turn": 3}}}, "max_turn"),
        ({"taskset": {}}, "taskset: got .*expected an id"),
        ({"taskset": "vf_sums", "size": 0}, "size"),
        ({"taskset": "vf_sums", "python": None}, r"python -m venv .*verifiers==0\.4\.0 uv, and pass python="),
        ({"taskset": "vf_sums", "python": "/no/such/python"}, "pip install verifiers==0.4.0 uv"),
        ({"taskset": "vf_sums", "python": sys.executable}, "No module named 'verifiers'"),
    ],
)
def test_what_cannot_be_played_is_said_before_the_first_episode(arguments, match):
    with pytest.raises(rlkit.ConfigError, match=match):
        verifiers(**{"python": PYTHON, "folder": FOLDER, **arguments})


def test_the_process_ends_with_its_tasks():
    environment = verifiers("vf_sums", harness="null", python=PYTHON, folder=FOLDER, name="dropped")
    pid = environment[0].make()._worker.child.pid
    del environment
    gc.collect()
    assert gone(pid)


def test_the_process_ends_with_its_stdin():
    worker = Worker(PYTHON, {"config": {"taskset": {"id": "vf_sums"}}, "size": None, "folder": str(FOLDER)}, {}, 120.0)
    process = worker.start()._process
    process.stdin.close()
    assert process.wait(60) == 0
