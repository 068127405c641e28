"""512 episodes at a time on the toy backend, beside a plain asyncio.gather loop; faults, and a sampler that is down.

    python benchmarks/rollouts.py [--rounds 3] [--episodes 512]

Each side plays the same tasks with the same limits in a process of its own, in turns with the other; medians. The
gather loop has no limit, no deadline, no threads and no checks: environments run in the event loop, one sample request
per turn. "lag" is how late the event loop wakes up a task that sleeps 10 ms. With GEM installed (gem-llm) its
GuessTheNumber is played too, and with openreward installed the environment of tests/envs/openreward_server.py, a server
in another process on 127.0.0.1: two tool calls and an answer, from a sampler that has them ready; there the plain loop
is the openreward SDK's own client. The table goes to the screen, the figures to benchmarks/results/rollouts.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import rlkit
from rlkit.backends.toy import ByteTokenizer
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


CALLS = [f'<tool_call>{{"name": "{n}", "arguments": {a}}}</tool_call>' for n, a in (
    ("look", '{"text": "here"}'), ("look", '{"text": "there"}'), ("answer", '{"value": 9}')
)]  # fmt: skip


class Calling:
    """A sampler that calls tools, as many turns into the episode as the prompt says."""

    tokenizer = ByteTokenizer()
    max_length, version = 4096, 0

    def sample(self, prompt: Any, _: Any, *, n: int = 1, **__: Any) -> rlkit.Future[Any]:
        turn = self.tokenizer.decode(prompt).count("you said")
        tokens = [*self.tokenizer.encode(CALLS[turn]), self.tokenizer.eos_ids[0]]
        return rlkit.Future.of([rlkit.Sample(prompt, tokens, [-1.0] * len(tokens)) for _ in range(n)])

    def logprobs(self, *_: Any, **__: Any) -> rlkit.Future[Any]:
        raise NotImplementedError

    def close(self) -> None: ...
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None: ...


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of an OpenReward server in another process."""
    script = Path(__file__).parents[1] / "tests" / "envs" / "openreward_server.py"
    environment = os.environ | {"OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        threading.Thread(target=process.stdout.read, daemon=True).start()
        time.sleep(1.0)  # bound, and soon listening
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


async def by_sdk(address: str, episodes: int) -> int:
    """What rlkit.envs.openreward does, with the SDK's client alone and no chat."""
    from openreward import AsyncEnvironmentsAPI

    client = AsyncEnvironmentsAPI(base_url=address, api_key=None)
    environment = client.get("sums", base_url=address)

    async def episode(index: int) -> int:
        async with environment.session(split="train", index=index % 10) as session:
            await session.get_messages()
            await session.list_tools()
            for call in CALLS:
                called = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
                await session.call_tool(called["name"], called["arguments"])
        return len(CALLS)

    try:
        return sum(await asyncio.gather(*[episode(number) for number in range(episodes)]))
    finally:
        await client.aclose()


def tasks(name: str, count: int, address: str = "") -> list[Task]:
    if name == "plain":
        return list(Tasks(lambda _: Guess(), count, name="guess"))
    if name == "openreward":
        from rlkit.envs import openreward

        games = openreward("sums", base_url=address)
        return [games[number % len(games)] for number in range(count)]
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


def side(name: str, env: str, episodes: int, address: str) -> dict[str, float]:
    sampler: Any = Calling() if address else rlkit.connect("toy", seed=0, max_length=4096).sampler().result()
    games = tasks(env, episodes // GROUP, address)
    sampler.sample([1], PARAMS).result()  # imports torch
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.monotonic(), time.process_time()
    play = rolled_out if name == "rollout" else gathered
    work = by_sdk(address, episodes) if address and name == "gather" else play(sampler, games)
    turns, found = asyncio.run(measured(work))
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


def interleaved(env: str, address: str, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """What each side measured, round by round."""
    runs: dict[str, list[dict[str, float]]] = {"gather": [], "rollout": []}
    for _ in range(arguments.rounds):
        for name, found in runs.items():
            command = [sys.executable, __file__, "--episodes", str(arguments.episodes), "--side", name, env, address]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--side", nargs=3)
    arguments = parser.parse_args()
    if arguments.side:
        name, env, address = arguments.side
        print(json.dumps(side(name, env, arguments.episodes, address)))
        return
    figures: dict[str, Any] = {"episodes": arguments.episodes, "turns": TURNS, "group": GROUP}
    print(f"{arguments.episodes} concurrent episodes, toy backend   wall s   CPU s   turns/s   memory MB   lag p99 ms")
    envs = ["plain"]
    envs += ["gem"] if importlib.util.find_spec("gem") else []
    envs += ["openreward"] if importlib.util.find_spec("openreward") else []
    for env in envs:
        with server() if env == "openreward" else contextlib.nullcontext("") as address:
            runs = interleaved(env, address, arguments)
        for name, found in runs.items():
            middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
            figures[f"{env}/{name}"] = middle
            rate = middle["turns"] / middle["wall"]
            print(
                f"{env:10} {name:24} {middle['wall']:9.1f} {middle['cpu']:7.1f} {rate:9.0f}"
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
