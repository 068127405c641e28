r"""Train an unmodified agent: agent_program.py, written with OpenAI's SDK and a tool, without rlkit.

    pip install openai
    python examples/agent.py                                                # on the toy, about a minute on a CPU
    python examples/agent.py process=true max_steps=3                       # each episode in a separate process
    python examples/agent.py backend=local
    python examples/agent.py backend=tinker model=Qwen/Qwen3-4B-Instruct-2507 warm_up=0

A key is always in the same one of ten drawers; the policy learns which by opening them. The toy, like any small model,
must first be shown how to write a call (``warm_up``). Run the program again to resume.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

import rlkit
from rlkit import config, credit
from rlkit.backends.protocol import TrainerBackend
from rlkit.chat import Chat
from rlkit.envs import Tasks, agent
from rlkit.rollouts import Plan, rollout_sync

sys.path.insert(0, str(Path(__file__).parent))
import agent_program  # the agent, unmodified

PROMPTS = ("Find the key.", "Where is the key?", "I need my key.", "Get me the key, please.")


@attrs.frozen
class Settings:
    """The settings.

    Args:
        backend, model: the policy.
        warm_up: steps of imitation that show how a call is written, with random drawers.
        process: whether each episode runs in a separate process, rather than in a thread.
        n: episodes of each prompt per step.
        folder: the run's folder; a run in it is resumed.
    """

    backend: Literal["toy", "local", "tinker"] = "toy"
    model: str = "smollm2-135m-instruct"
    lora_rank: int = 16
    learning_rate: float | None = None
    warm_up: int = 80
    process: bool = False
    max_steps: int = 15
    n: int = 8
    max_tokens: int = 80
    save_every: int = 5
    seed: int = 0
    folder: str = "runs/agent"

    def __attrs_post_init__(self) -> None:
        Plan(n=self.n, params=rlkit.SamplingParams(max_tokens=self.max_tokens), seed=self.seed)
        rlkit.Adam(learning_rate=self.rate)
        if self.warm_up < 0 or self.max_steps < 1 or self.save_every < 1:
            raise rlkit.ConfigError("warm_up: at least 0; max_steps and save_every: at least 1")

    @property
    def rate(self) -> float:
        """Return the learning rate: the toy learns faster than models."""
        return self.learning_rate or (0.1 if self.backend == "toy" else 2e-4)


def run(task: dict[str, Any], session: Any) -> dict[str, Any]:
    """Play one episode: the agent gets a client of the session and is otherwise unchanged."""
    with agent_program.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        return agent_program.find_key(client, task["prompt"], model=session.model)


def reward(result: dict[str, Any] | str, task: dict[str, Any]) -> float:  # noqa: ARG001
    """Return 1 if the first drawer has the key, less for each further drawer opened."""
    end = json.loads(result) if isinstance(result, str) else result  # a process prints the result
    return 1.2 - 0.2 * len(end["opened"]) if end["found"] else 0.0


def tasks(s: Settings) -> Tasks:
    """Make one task per prompt."""
    program = [sys.executable, str(Path(__file__).with_name("agent_program.py"))]
    return agent(program if s.process else run, reward, [{"prompt": text} for text in PROMPTS], name="drawers")


def warm_up(s: Settings, policy: TrainerBackend, chat: Chat) -> None:
    """Show the policy a call for each drawer."""
    schemas = [{"type": "function", "function": agent_program.TOOL}]
    data = []
    for number in range(10):
        prompt = chat.start(PROMPTS[number % len(PROMPTS)], schemas).prompt
        call = {"name": agent_program.TOOL["name"], "arguments": {"number": number}}
        tokens = policy.tokenizer.encode(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
        data.append(rlkit.Datum.supervised(prompt, np.append(tokens, chat.end)))
    for _ in range(s.warm_up):
        policy.forward_backward([d.with_inputs(weights=1 / len(data)) for d in data], "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=s.rate)).result()


def train(s: Settings) -> list[float]:
    """Train, and return the mean reward of each step."""
    means = []
    with rlkit.Run(s.folder, seed=s.seed, config=config.dump(s), trackers=("jsonl",)) as run:
        options: dict[str, Any] = {"max_length": 4096} if s.backend == "toy" else {"lora": rlkit.Lora(rank=s.lora_rank)}
        policy = run.connect(s.backend, model=s.model, **options)
        chat = Chat(policy.tokenizer, history="append")
        if run.step == 0:
            warm_up(s, policy, chat)
        params = rlkit.SamplingParams(max_tokens=s.max_tokens)
        plan = Plan(n=s.n, params=params, chat=chat, max_turns=4, deadline=120.0, seed=s.seed)
        for step in run.steps(s.max_steps):
            with policy.sampler().result() as sampler:
                groups = rollout_sync(sampler, tasks(s).batch(step, len(PROMPTS)), step=step, plan=plan)
            batch = credit.assign(groups, "grpo", split="allow")
            policy.forward_backward(batch.data, "ppo")
            policy.optim_step(rlkit.Adam(learning_rate=s.rate)).result()
            run.log(groups.metrics | batch.metrics)
            run.log_trajectories(groups, advantages=batch.advantages)
            run.checkpoint(policy, every=s.save_every)
            means.append(groups.metrics["env/drawers/reward"])
            failed, turns = groups.metrics["env/drawers/failed"], groups.metrics["env/drawers/turns"]
            print(f"step {step:2}  reward {means[-1]:.2f}  turns {turns:.1f}  failed {failed:.0f}")
    return means


def main(arguments: list[str]) -> None:
    """Run a command line."""
    if arguments in (["help"], ["--help"], ["-h"]):
        print(__doc__, config.describe(Settings), sep="\n")
        return
    try:
        train(config.load(Settings, overrides=arguments))
    except rlkit.RlkitError as error:
        sys.exit(f"agent.py: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
