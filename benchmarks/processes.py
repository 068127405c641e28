"""W's training on one process and on two, one thread each.

    python benchmarks/processes.py [--case W] [--model MODEL] [--rounds 2] [--dtype float32]

Fixed completions, so that both compute the same. The CPU seconds of a step are those of each process between the same
two calls; a machine with a core for each process waits for the largest of them, the critical path. Wall times mean
something only where as many cores are idle. Figures go to the screen and to benchmarks/results/processes-CASE.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import runner
import workload

import rlkit
from rlkit.backends.local.distributed.launch import PROGRAM

TICK = os.sysconf("SC_CLK_TCK")


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def others() -> list[int]:
    """The ranks that this process started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid() and PROGRAM in command:
            found.append(int(folder.name))
    return found


def data_of(case: str, policy) -> list[rlkit.Datum]:
    """The datums of a GRPO step with fixed completions."""
    lengths, group, tokens = workload.CASES[case]
    prompts = workload.prompts(policy.tokenizer.encode, lengths)
    data = []
    for k, prompt in enumerate(prompt for prompt in prompts for _ in range(group)):
        completion = workload.completion(policy.tokenizer.vocab_size, k)[:tokens]
        sample = rlkit.Sample(prompt, completion, np.full(tokens, -10.8, np.float32))
        data.append(sample.datum(workload.advantage(k)))
    return data


def step(policy, data, pids: list[int]) -> dict[str, float]:
    """A gradient and an update: wall seconds, and CPU seconds of the processes ``pids``, this one first."""
    before, began = [cpu_of(pid) for pid in pids], time.monotonic()
    policy.forward_backward(data, "importance_sampling").result()
    middle = time.monotonic()
    policy.optim_step(rlkit.Adam()).result()
    ended = time.monotonic()
    cpu = [cpu_of(pid) - x for pid, x in zip(pids, before, strict=True)]
    return {"wall": ended - began, "update": ended - middle, "critical": max(cpu), "cpu": sum(cpu), "cpu_0": cpu[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", default="W", choices=workload.CASES)
    parser.add_argument("--model", default=workload.MODEL)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    lora = rlkit.Lora(rank=workload.RANK, train_unembed=False)
    chosen = {"model": options.model, "lora": lora, "seed": 0, "dtype": options.dtype, "device": "cpu"}
    with rlkit.connect("local", **chosen) as one, rlkit.connect("local", processes=2, **chosen) as two:
        data = data_of(options.case, one)
        warm_up = data_of("warm-up", one)
        sides = {"one": one, "two": two}
        pids = {"one": [os.getpid()], "two": [os.getpid(), *others()]}
        for name, policy in sides.items():
            step(policy, warm_up, pids[name])
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, policy in sides.items():
                rounds[name].append(step(policy, data, pids[name]))
                print(name, {key: round(value, 2) for key, value in rounds[name][-1].items()}, flush=True)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in rounds.items()
    }
    a, b = medians["one"], medians["two"]
    ratios = {"critical path": a["critical"] / b["critical"], "wall": a["wall"] / b["wall"], "cpu": b["cpu"] / a["cpu"]}
    print({key: round(value, 2) for key, value in ratios.items()})
    lengths, group, tokens = workload.CASES[options.case]
    runner.write(
        f"processes-{options.case}",
        {
            "prompts": lengths,
            "completions_of_each": group,
            "tokens_of_a_completion": tokens,
            "dtype": options.dtype,
            "threads_of_each": 1,
            "rounds": options.rounds,
            "machine": runner.machine(),
            "medians": medians,
            "one_over_two": ratios,
        },
    )


if __name__ == "__main__":
    main()
