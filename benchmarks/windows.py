"""Models with sliding windows, in slots and trees, beside plain peft.

    python benchmarks/windows.py [--rounds 2] [--threads 1]

The first 10 layers of SmolLM2-135M: as they are; as Mistral with a window of 32 tokens in every layer; as SmolLM3 with
that window in every other layer. Beside them TRL's way: ``generate`` with the adapter unmerged in one padded batch of
all rows, and a padded step of 8 rows at a time. Prompts of 37 to 78 tokens with 8 completions each, of 32 tokens in
sampling and 64 in training. Each side is a process of its own; they take turns after a warm-up. Tokens of completions
per CPU second go to the screen and to benchmarks/results/windows.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import runner
import workload

WINDOW, LAYERS = 32, 10
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
MODELS = {
    "Llama, no window": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": WINDOW}),
    "SmolLM3": (
        "smollm3",
        {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": MIXED, "no_rope_layers": [1] * LAYERS},
    ),
}
SIDES = (("rlkit", "Llama, no window"), ("rlkit", "Mistral"), ("naive", "Mistral"), ("rlkit", "SmolLM3"))
JOBS = {
    "sample": {"lengths": (37, 51, 64, 78), "group": 8, "tokens": 32},
    "train": {"lengths": (37, 78), "group": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    from rlkit.backends.local.hub import model_path

    with tempfile.TemporaryDirectory() as folder:
        source = Path(model_path(workload.MODEL))
        paths = {
            name: str(workload.cut(source, Path(folder) / kind, kind, LAYERS, **settings))
            for name, (kind, settings) in MODELS.items()
        }
        sides = []
        for kind, name in SIDES:
            sides.append(runner.Side(kind, "float32", options.threads, model=paths[name]))
            sides[-1].name = f"{name}, {kind}"
        for side in sides:
            side.do("sample", lengths=[16], group=2, tokens=4)
            side.do("train", lengths=[16], group=2)
        found = {job: runner.interleaved(sides, options.rounds, job, **JOBS[job]) for job in JOBS}
        for side in sides:
            side.end()
    rates = {
        side.name: {job: found[job][side.name]["tokens"] / found[job][side.name]["cpu"] for job in JOBS}
        for side in sides
    }
    for name, rate in rates.items():
        print(f"{name:26}" + "".join(f"  {job} {tokens:.1f} tokens per CPU s" for job, tokens in rate.items()))
    runner.write(
        "windows",
        {
            "threads": options.threads,
            "rounds": options.rounds,
            "machine": runner.machine(),
            "versions": sides[0].versions,
            "tokens_per_cpu_s": rates,
        },
    )


if __name__ == "__main__":
    main()
