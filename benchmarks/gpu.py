"""The speed of the local backend on a GPU: decoding, training, memory, and their part of the device's limits.

    python benchmarks/gpu.py [--shapes 0.6B 7B] [--device cuda]

Models of Qwen's shapes with random weights (15 GB for 7B), in the dtype and with the options that are the device's own.
Decoding with CUDA graphs and without, training, and their parts of what memory and products of this device allow, which
is measured, too. Wall seconds, medians after a warm-up, go to the screen and to benchmarks/results/gpu-SHAPE.json.
`--shapes tiny --device cpu` tries the script.

A decoding step has to read every weight and the keys and values of every row; training computes each weight once
forward and once backward for a token, and the head for the completions' tokens.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import attrs
import numpy as np
import runner
import torch

from rlkit.backends.early import device_of
from rlkit.backends.local import LocalBackend
from rlkit.testing.device import write_model
from rlkit.types import Adam, Lora, Sample, SamplingParams

DEEP = {"num_hidden_layers": 28, "head_dim": 128, "dtype": "bfloat16"}
SHAPES = {
    "tiny": {},
    "0.6B": DEEP
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": DEEP
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
}


@attrs.frozen
class Load:
    """Tokens of a prompt and of a completion, completions decoded at a time, and groups of 8 to train on."""

    prompt: int
    tokens: int
    rows: tuple[int, ...]
    groups: int


SMALL, LARGE = Load(48, 24, (1, 8), 2), Load(512, 128, (1, 8, 64, 256), 16)
ROUNDS = 2


def roofline(device: torch.device) -> dict[str, object]:
    """Return products per second, as operations, in float32 and bfloat16, and bytes of memory per second."""
    size, copied = (512, 2**24) if device.type == "cpu" else (8192, 2**29)
    found: dict[str, object] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(x)
        seconds = _median(device, lambda: torch.mm(x, y, out=out), rounds=5)  # noqa: B023
        found[f"operations per second, {str(dtype).removeprefix('torch.')}"] = 2.0 * size**3 / seconds
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["bytes per second"] = 2.0 * copied / _median(device, lambda: target.copy_(source), rounds=5)
    return found


def measure(model: Path, device: torch.device, limits: Mapping[str, object]) -> dict[str, object]:
    """Return tokens per second of decoding and training, their shares of the limits, and peaks of memory.

    Args:
        model: a folder.
        device: where.
        limits: as from ``roofline``.
    """
    load = SMALL if device.type == "cpu" else LARGE
    found: dict[str, object] = {}
    peak = "peak bytes" if device.type == "cuda" else "peak bytes of the process"
    for graphs in (True, False) if device.type == "cuda" else (False,):
        _reset_peak(device)
        policy = LocalBackend(
            model=str(model),
            lora=Lora(rank=16, train_unembed=False),
            seed=0,
            device=str(device),
            prefix_mb=0,
            cuda_graphs=graphs,
        )
        with policy:
            how = ", CUDA graphs" if graphs else ""
            if f"{peak}, loaded" not in found:
                found[f"{peak}, loaded"] = _peak(device)
            for rows in load.rows:
                name = f"decoding {rows} row{'s' * (rows > 1)}{how}"
                found[name] = _decoding(policy, device, rows, load, limits)
            found[f"{peak}, decoding{how}"] = _peak(device)
            if not graphs:
                _reset_peak(device)
                found["training"] = _training(policy, device, load, limits)
                found[f"{peak}, training"] = _peak(device)
    return found


def _decoding(
    policy: LocalBackend, device: torch.device, rows: int, load: Load, limits: Mapping[str, object]
) -> dict[str, float]:
    """Measure the decoding of ``rows`` completions of one prompt, without the prompt's time."""
    prompt, tokens = np.random.default_rng(0).integers(3, 250, load.prompt), load.tokens

    def job(count: int) -> None:
        with policy.sampler().result() as sampler:
            sampler.sample(prompt, SamplingParams(max_tokens=count, stop=()), n=rows, seed=0).result()

    seconds = _median(device, lambda: job(tokens)) - _median(device, lambda: job(1))
    model = policy.base.model
    config, step, width = model.config, seconds / (tokens - 1), model.dtype.itemsize
    per_token = 2 * width * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    read = policy.base.nbytes + rows * per_token * (load.prompt + tokens / 2)
    operations = 2.0 * rows * policy.base.nbytes / width
    return {"tokens per second": rows / step} | _parts(limits, model.dtype, step, read=read, operations=operations)


def _training(policy: LocalBackend, device: torch.device, load: Load, limits: Mapping[str, object]) -> dict[str, float]:
    """Compute a gradient and an update on groups of 8 completions."""
    rng, data, tokens = np.random.default_rng(0), [], load.tokens
    for _ in range(load.groups):
        prompt = rng.integers(3, 250, load.prompt)
        samples = [Sample(prompt, rng.integers(3, 250, tokens), [-7.0] * tokens) for _ in range(8)]
        data += [sample.datum(float(rng.normal())) for sample in samples]

    def job() -> None:
        policy.forward_backward(data, "importance_sampling")
        policy.optim_step(Adam()).result()

    seconds = _median(device, job)
    model = policy.base.model
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = policy.base.nbytes / model.dtype.itemsize - head * (1 if config.tie_word_embeddings else 2)
    completed = load.groups * 8 * tokens
    operations = 4.0 * (body * (load.groups * load.prompt + completed) + head * completed)
    speed = {"completion tokens per second": completed / seconds}
    return speed | _parts(limits, model.dtype, seconds, operations=operations)


def _parts(
    limits: Mapping[str, object], dtype: torch.dtype, seconds: float, *, operations: float, read: float | None = None
) -> dict[str, float]:
    """Return the share of the limits that was reached."""
    found = {}
    for name, amount, key in (
        ("of the memory's limit", read, "bytes per second"),
        ("of the products' limit", operations, f"operations per second, {str(dtype).removeprefix('torch.')}"),
    ):
        limit = limits.get(key)
        if isinstance(limit, float) and amount is not None:
            found[name] = amount / limit / seconds
    return found


def _median(device: torch.device, job: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median wall seconds of ``job``, after a warm-up."""
    taken = []
    for _ in range(rounds + 1):
        _wait(device)
        began = time.perf_counter()
        job()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    """Return the peak bytes since ``_reset_peak``; of a CPU, of the process so far; of MPS, now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    try:
        import resource
    except ImportError:  # a system without it
        return None
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def machine(device: torch.device) -> dict[str, object]:
    """The device and the versions."""
    found: dict[str, object] = {"device": device.type, "system": f"{platform.system()} {platform.machine()}"}
    if device.type == "cuda":
        found["name"] = torch.cuda.get_device_name(device)
        found["memory"] = torch.cuda.get_device_properties(device).total_memory
        found["cuda"] = torch.version.cuda
    return found | {name: version(name) for name in ("rlkit-lm", "torch", "transformers", "peft")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "7B"], choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = device_of(options.device)
    limits = roofline(device)
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(write_model(Path(folder), **SHAPES[shape]), device, limits)
        for name, value in found.items():
            print(f"{shape}: {name}: {value}", flush=True)
        runner.write(f"gpu-{shape}", {"machine": machine(device), "roofline": limits, "rows": found})


if __name__ == "__main__":
    main()
