"""One datum of 1k to 64k tokens: peak memory of its gradient, and what computing it in parts costs in time.

    python benchmarks/long_datums.py [--lengths 1024 4096 16384 65536] [--without] [--kind llama gemma3 qwen3_5]

Memory is that of a model of four layers of width 256 with one head of 32 and random weights, so that attention over
64k tokens takes minutes; parts are of 1,024 tokens. ``llama`` runs by rlkit's own forward, ``gemma3`` (three layers
with a window of 512 and one without) and ``qwen3_5`` (three of linear attention and one of attention) by the
library's modules. The last 128 tokens are trained on. Every cell is a process of its own: the largest resident size
while a gradient is computed, less the size before, "in parts" with ``offload_folder`` and without (``--without``: the
longest, too), and "at once". CPU seconds are of layers of SmolLM2-135M's shape, six of them, both ways in one process
in turn; the figure is the median of two rounds after a warm-up. The table goes to the screen and to
benchmarks/results/long_datums.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import runner
import workload

BUDGET, WHOLE = 1024, 2**20
KINDS = ["llama", "gemma3", "qwen3_5"]
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
SMOL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6}
SMOL |= {"num_attention_heads": 9, "num_key_value_heads": 3}


LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}


def build(folder: Path, shape: dict, kind: str = "llama") -> str:
    """A random model with the workload's tokenizer."""
    import transformers

    from rlkit.backends.local.hub import model_path

    layers = shape["num_hidden_layers"]
    more: dict = {
        "llama": {},
        "gemma3_text": {
            "sliding_window": 512,
            "layer_types": [*["sliding_attention"] * (layers - 1), "full_attention"],
            "query_pre_attn_scalar": shape["hidden_size"] // shape["num_attention_heads"],
        },
        "qwen3_5_text": {
            **LINEAR,
            "layer_types": [*["linear_attention"] * (layers - 1), "full_attention"],
        },
    }[kind]
    shape = {"head_dim": shape["hidden_size"] // shape["num_attention_heads"], **shape, **more}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=49152, max_position_embeddings=WHOLE, tie_word_embeddings=True, **shape
    )
    transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder)
    for file in Path(model_path(workload.MODEL)).glob("*token*"):
        shutil.copy(file, folder)
    return str(folder)


def connected(model: str, budget: int, offload: str | None = None):
    """A policy of one thread."""
    import torch

    import rlkit

    torch.set_num_threads(1)
    options = {"lora": rlkit.Lora(rank=workload.RANK, train_unembed=False), "seed": 0, "device": "cpu"}
    return rlkit.connect("local", model=model, micro_batch_tokens=budget, offload_folder=offload, **options)


def gradient(policy, length: int, trained: int) -> float:
    """CPU seconds of the gradient of a text whose last tokens are trained on."""
    import rlkit

    tokens = np.random.default_rng(length).integers(100, 40000, length + 1)
    began = time.process_time()
    data = [rlkit.Datum.supervised(tokens[:-trained], tokens[-trained:])]
    policy.forward_backward(data, "cross_entropy").result()
    return time.process_time() - began


def cell(model: str, length: int, budget: int, offload: str | None) -> dict:
    """Megabytes above the loaded model, and CPU seconds, of this process."""
    status = Path("/proc/self/status")
    with connected(model, budget, offload) as policy:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = _kilobytes(status, "VmRSS")
        seconds = gradient(policy, length, 128)
        return {"MB": (_kilobytes(status, "VmHWM") - before) / 1e3, "cpu": seconds}


def _kilobytes(status: Path, name: str) -> int:
    line = next(x for x in status.read_text().splitlines() if x.startswith(name))
    return int(line.split()[1])


def times(model: str, lengths: list[int]) -> list[dict]:
    """CPU seconds in parts and at once, in turn."""
    sides = {"at once": connected(model, WHOLE), "in parts": connected(model, BUDGET)}
    rows = []
    for length in lengths:
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(3):
            for name, policy in sides.items():
                taken[name].append(gradient(policy, length, length // 8))
                policy.discard().result()
        row: dict = {name: statistics.median(found[1:]) for name, found in taken.items()}
        rows.append({"tokens": length, **row, "ratio": row["in parts"] / row["at once"]})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--without", action="store_true", help="the longest in memory, too")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        model, length, budget, offload = args.cell
        print(json.dumps(cell(model, int(length), int(budget), offload or None)))
        return
    result: dict = {"machine": runner.machine(), "parts": BUDGET}
    for name in args.kind:
        kind = name if name == "llama" else f"{name}_text"
        with tempfile.TemporaryDirectory() as folder:
            small, smol = build(Path(folder) / "small", SMALL, kind), build(Path(folder) / "smol", SMOL, kind)
            timed = times(smol, [2048, 4096])
            result[name] = {"memory": memory(small, args.lengths, folder, without=args.without), "time": timed}
    runner.write("long_datums", result)


def memory(model: str, lengths: list[int], folder: str, *, without: bool) -> list[dict]:
    """Megabytes of each way, each in a process of its own."""
    rows = []
    for length in lengths:
        row: dict = {"tokens": length}
        ways = {"at once": (WHOLE, ""), "in parts": (BUDGET, ""), "in parts, offloaded": (BUDGET, folder)}
        if length > 16384:
            del ways["at once"]
            if not without:
                del ways["in parts"]
        for way, (budget, offload) in ways.items():
            command = [sys.executable, __file__, "--cell", model, str(length), str(budget), offload]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            row[way] = json.loads(out.splitlines()[-1])
        rows.append(row)
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    main()
