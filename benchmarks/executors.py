"""256 episodes of an environment that computes: in threads of this process, and in two worker processes of Ray.

    python benchmarks/executors.py [--rounds 3] [--episodes 256] [--milliseconds 20] [--workers 2]

Each episode has two turns; each turn burns CPU in Python, which holds the interpreter. A sampler answers at once. The
sides are played in turns; Ray's own start is not counted, every round's start and end of its workers is. Beside the
clock, which says something on an idle machine only, stand CPU seconds: those in threads, all in one process, by those
that bound the other side on as many cores as there are workers: of the busiest worker, or of all processes shared out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

import numpy as np

import rlkit
from rlkit.backends.toy import ByteTokenizer
from rlkit.envs import StepResult, Tasks
from rlkit.rollouts import Ray, rollout

PARAMS = rlkit.SamplingParams(max_tokens=4)


class Sampler:
    """Answers at once."""

    tokenizer = ByteTokenizer()
    max_length = 4096
    version = 0

    def sample(self, prompt, params, *, n=1, seed=None):  # noqa: ARG002
        sample = rlkit.Sample(np.asarray(prompt), [65, 66], [-1.0, -1.0], "stop", version=0, **params.sampling_options)
        return rlkit.Future.of([sample] * n)

    def logprobs(self, tokens, *, temperature=1.0):  # noqa: ARG002
        return rlkit.Future.of(np.zeros(len(tokens), np.float32))

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


def burn(loops: int) -> int:
    """Compute in Python."""
    total = 0
    for i in range(loops):
        total += i * i % 7
    return total


class Burner:
    """Two steps that compute."""

    def __init__(self, loops: int) -> None:
        self.loops = loops
        self.steps = 0

    def reset(self, seed):  # noqa: ARG002
        return "Begin"

    def step(self, action):  # noqa: ARG002
        burn(self.loops)
        self.steps += 1
        used = {"pid": os.getpid(), "cpu": time.process_time()}
        return StepResult("More.", 1.0, self.steps == 2, info=used)

    def close(self):
        pass


def play(tasks: Tasks, groups: int, **options: object) -> tuple[float, float, list[float]]:
    """Return the seconds that the episodes took, and CPU seconds: this process's, and each worker's since its start."""
    began, used = time.perf_counter(), time.process_time()
    played = asyncio.run(rollout(Sampler(), tasks.batch(0, groups), n=8, params=PARAMS, progress=False, **options))
    turns = [turn for group in played for trajectory in group.trajectories for turn in trajectory.turns]
    assert len(turns) == groups * 16
    workers: dict[float, float] = {}
    for turn in turns:
        pid = turn.metrics["pid"]
        workers[pid] = max(workers.get(pid, 0.0), turn.metrics["cpu"])
    workers.pop(os.getpid(), None)
    return time.perf_counter() - began, time.process_time() - used, list(workers.values())


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of CPU, a step")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    burn(300_000)
    loops = int(300_000 * options.milliseconds / 1000 / min(_timed(300_000) for _ in range(5)))
    tasks = Tasks(lambda index: Burner(loops), 64, name="burner")
    on_ray = {"executor": Ray(workers=options.workers, num_cpus=1)}
    play(tasks, 1, **on_ray)  # starts Ray
    ratios, bounds = [], []
    for _ in range(options.rounds):
        there, main_cpu, workers = play(tasks, options.episodes // 8, **on_ray)
        here, alone_cpu, _ = play(tasks, options.episodes // 8)
        bound = max(*workers, (main_cpu + sum(workers)) / options.workers)
        ratios.append(here / there)
        bounds.append(alone_cpu / bound)
        each = " + ".join(f"{seconds:.1f}" for seconds in workers)
        print(
            f"threads: {here:.1f} s, {alone_cpu:.1f} CPU s; ray: {there:.1f} s, {main_cpu:.1f} + {each} CPU s", end="; "
        )
        print(f"{ratios[-1]:.2f} times as fast by the clock, {bounds[-1]:.2f} by CPU seconds", flush=True)
    print(f"medians: {statistics.median(ratios):.2f} by the clock, {statistics.median(bounds):.2f} by CPU seconds")


def _timed(loops: int) -> float:
    began = time.process_time()
    burn(loops)
    return time.process_time() - began


if __name__ == "__main__":
    main()
