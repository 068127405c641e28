"""512 episodes at a time on the toy backend, beside a plain asyncio.gather loop; faults, and a sampler that is down.

    python benchmarks/rollouts.py [--rounds 3] [--episodes 512]

Each side plays the same tasks with the same limits in a process of its own, in turns with the other; medians. The
gather loop has no limit, no deadline, no threads and no checks: environments run in the event loop, one sample request
per turn. "lag" is how late the event loop wakes up a task that sleeps 10 ms. With GEM installed (gem-llm) its
GuessTheNumber is played too. The table goes to the screen, the figures to benchmarks/results/rollouts.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import rlkit
from rlkit.chat import Chat
from rlkit.envs import StepResult, Task, Tasks
from rlkit.rollouts import rollout

PARAMS = rlkit.SamplingParams(max_tokens=16)
GROUP = 8
TURNS = 4


class Guess:
    """Wants a digit, and says so again until it is over."""

    def reset(self, seed: int) -> str:
        self.turns = 0
        return f"Guess my number (game {seed % 1000})."

    def step(self, action: str) -> StepResult:
        self.turns += 1
        return StepResult("Lower. Guess again.", float("5" in action), self.turns >= TURNS)

    def close(self) -> None: ...


def tasks(name: str, count: int) -> list[Task]:
    if name == "plain":
        return list(Tasks(lambda _: Guess(), count, name="guess"))
    from rlkit.envs import gem

    return list(gem("game:GuessTheNumber-v0-easy", size=count, max_turns=TURNS, name="guess"))


async def gathered(sampler: Any, games: list[Task]) -> int:
    """The loop that one writes first; returns the number of turns."""
    chat = Chat(sampler.tokenizer)

    async def episode(task: Task, member: int) -> int:
        env = task.make()
        conversation = chat.start(env.reset(task.seed or 0))
        for turn in range(TURNS):
            seed = hash((task.index, member, turn)) % 2**63
            (sample,) = await sampler.sample(conversation.prompt, PARAMS, n=1, seed=seed)
            action = chat.action(sample.tokens, sample.stop_reason)
            result = env.step(action)
            if result.terminated or result.truncated:
                break
            conversation.add(action, result.observation)
        env.close()
        return turn + 1

    return sum(await asyncio.gather(*[episode(task, m) for task in games for m in range(GROUP)]))


async def rolled_out(sampler: Any, games: list[Task]) -> int:
    groups = await rollout(
        sampler, games, n=GROUP, params=PARAMS, max_turns=TURNS, concurrency=GROUP * len(games), progress=False
    )
    return sum(len(t.turns) for group in groups for t in group.trajectories)


async def lags(found: list[float]) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.01)
        found.append(time.monotonic() - began - 0.01)


async def measured(work: Any) -> tuple[Any, list[float]]:
    """What ``work`` gives, and how late the loop was meanwhile."""
    found: list[float] = []
    watch = asyncio.create_task(lags(found))
    try:
        return await work, found
    finally:
        watch.cancel()


def side(name: str, env: str, episodes: int) -> dict[str, float]:
    sampler = rlkit.connect("toy", seed=0, max_length=4096).sampler().result()
    games = tasks(env, episodes // GROUP)
    sampler.sample([1], PARAMS).result()  # imports torch
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.monotonic(), time.process_time()
    play = rolled_out if name == "rollout" else gathered
    turns, found = asyncio.run(measured(play(sampler, games)))
    wall = time.monotonic() - wall
    return {
        "wall": wall,
        "cpu": time.process_time() - cpu,
        "turns": turns,
        "memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "lag_p99": float(np.quantile(found, 0.99)) if found else wall,  # it never let the other task run
    }


def faults() -> dict[str, float]:
    """All the faults of tests/rollouts/test_faults.py at once beside healthy episodes."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.rollouts.parts import Counted, RandomSampler, all_closed
    from tests.rollouts.test_faults import FAULTS

    games = [Task(Counted, "good")] * 16 + [Task(env, f"bad-{name}") for name, env in FAULTS.items()]
    _, idle = asyncio.run(measured(asyncio.sleep(3.0)))
    work = rollout(
        RandomSampler(), games, n=2, params=PARAMS, concurrency=256, call_timeout=6.0, deadline=60.0, progress=False
    )
    wall = time.monotonic()
    groups, found = asyncio.run(measured(work))
    wall = time.monotonic() - wall
    closed = all_closed()
    return {
        "kinds": len(FAULTS),
        "failed": sum(v for k, v in groups.metrics.items() if k.startswith("env/bad") and k.endswith("/failed")),
        "faulty_groups_kept": sum(group.env != "good" for group in groups),
        "healthy_groups_kept": sum(group.env == "good" for group in groups),
        "all_closed": float(closed),
        "wall": wall,
        "lag_p99": float(np.quantile(found, 0.99)),
        "lag_max": max(found),
        "lag_p99_of_an_idle_loop": float(np.quantile(idle, 0.99)),
    }


def dead() -> dict[str, float]:
    """A sampler that refuses connections: requests and seconds until the error."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.rollouts.parts import Counted
    from tests.rollouts.test_rollout import Dead

    sampler = Dead(ConnectionRefusedError("nobody there"))
    began = time.monotonic()
    try:
        asyncio.run(rollout(sampler, [Counted] * 8, n=8, attempts=6, progress=False))
    except rlkit.BackendError as error:
        text = str(error)
    wall = time.monotonic() - began
    print("the error:", text)
    return {"requests": len(sampler.requests), "wall": wall, "requests_per_second": len(sampler.requests) / wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--side", nargs=2)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(side(*arguments.side, arguments.episodes)))
        return
    figures: dict[str, Any] = {"episodes": arguments.episodes, "turns": TURNS, "group": GROUP}
    print(f"{arguments.episodes} concurrent episodes, toy backend   wall s   CPU s   turns/s   memory MB   lag p99 ms")
    try:
        tasks("gem", 1)
        envs = ["plain", "gem"]
    except rlkit.ConfigError:
        envs = ["plain"]
    for env in envs:
        runs: dict[str, list[dict[str, float]]] = {"gather": [], "rollout": []}
        for _ in range(arguments.rounds):
            for name, found in runs.items():
                command = [sys.executable, __file__, "--episodes", str(arguments.episodes), "--side", name, env]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
        for name, found in runs.items():
            middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
            figures[f"{env}/{name}"] = middle
            rate = middle["turns"] / middle["wall"]
            print(
                f"{env:8} {name:26} {middle['wall']:9.1f} {middle['cpu']:7.1f} {rate:9.0f}"
                f" {middle['memory_mb']:11.0f} {1000 * middle['lag_p99']:12.1f}",
                flush=True,
            )
    figures["faults"], figures["dead sampler"] = faults(), dead()
    for name in ("faults", "dead sampler"):
        print(name, {key: round(value, 3) for key, value in figures[name].items()})
    path = Path(__file__).parent / "results" / "rollouts.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
