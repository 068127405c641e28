"""How fast a device decodes and trains, and how near that is to what its memory and its products allow.

A decoding step has to read every weight and the keys and values of every row; training computes each weight once
forward and once backward for a token, and the head for the completions' tokens. The limits are measured here, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlkit
from rlkit.backends.local import LocalBackend

__all__ = ["measured", "roofline"]

PROMPT, TOKENS = 512, 128
ROWS = (1, 8, 64, 256)
SMALL = {"prompt": 48, "tokens": 24, "rows": (1, 8), "groups": 2}
LARGE = {"prompt": PROMPT, "tokens": TOKENS, "rows": ROWS, "groups": 16}
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


def measured(
    model: Path, device: torch.device, parts: Mapping[str, Mapping[str, object]], time_left: Callable[[], bool]
) -> dict[str, object]:
    """Return tokens per second of decoding and training, their parts of the limits, and peaks of memory.

    Args:
        model: a folder.
        device: where.
        parts: with "roofline".
        time_left: whether more may begin.
    """
    settings: dict[str, Any] = SMALL if device.type == "cpu" else LARGE
    limits = parts.get("roofline", {})
    found: dict[str, object] = {}
    peak = "peak bytes" if device.type == "cuda" else "peak bytes of the process"
    for graphs in (True, False) if device.type == "cuda" else (False,):
        _reset_peak(device)
        policy = LocalBackend(
            model=str(model),
            lora=rlkit.Lora(rank=16, train_unembed=False),
            seed=0,
            device=str(device),
            prefix_mb=0,
            cuda_graphs=graphs,
        )
        with policy:
            how = ", CUDA graphs" if graphs else ""
            if f"{peak}, loaded" not in found:
                found[f"{peak}, loaded"] = _peak(device)
            for rows in settings["rows"]:
                if time_left():
                    found[f"decoding {rows} row{'s' * (rows > 1)}{how}"] = _decoding(
                        policy, device, rows, settings, limits
                    )
            found[f"{peak}, decoding{how}"] = _peak(device)
            if not graphs and time_left():
                _reset_peak(device)
                found["training"] = _training(policy, device, settings, limits)
                found[f"{peak}, training"] = _peak(device)
    return found


def _decoding(
    policy: LocalBackend, device: torch.device, rows: int, settings: Mapping[str, Any], limits: Mapping[str, object]
) -> dict[str, float]:
    """Completions of one prompt, ``rows`` of them, without the prompt's time."""
    prompt, tokens = np.random.default_rng(0).integers(3, 250, settings["prompt"]), settings["tokens"]

    def job(count: int) -> None:
        with policy.sampler().result() as sampler:
            sampler.sample(prompt, rlkit.SamplingParams(max_tokens=count, stop=()), n=rows, seed=0).result()

    seconds = _median(device, lambda: job(tokens)) - _median(device, lambda: job(1))
    model: Any = policy.base.model
    config, step, width = model.config, seconds / (tokens - 1), model.dtype.itemsize
    per_token = 2 * width * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    read = policy.base.nbytes + rows * per_token * (settings["prompt"] + tokens / 2)
    operations = 2.0 * rows * policy.base.nbytes / width
    return {"tokens per second": rows / step} | _parts(limits, model.dtype, step, read=read, operations=operations)


def _training(
    policy: LocalBackend, device: torch.device, settings: Mapping[str, Any], limits: Mapping[str, object]
) -> dict[str, float]:
    """A gradient and an update on groups of 8 completions."""
    rng, data, tokens = np.random.default_rng(0), [], settings["tokens"]
    for _ in range(settings["groups"]):
        prompt = rng.integers(3, 250, settings["prompt"])
        samples = [rlkit.Sample(prompt, rng.integers(3, 250, tokens), [-7.0] * tokens) for _ in range(8)]
        data += [sample.datum(float(rng.normal())) for sample in samples]

    def job() -> None:
        policy.forward_backward(data, "importance_sampling")
        policy.optim_step(rlkit.Adam()).result()

    seconds = _median(device, job)
    model: Any = policy.base.model
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = policy.base.nbytes / model.dtype.itemsize - head * (1 if config.tie_word_embeddings else 2)
    completed = settings["groups"] * 8 * tokens
    operations = 4.0 * (body * (settings["groups"] * settings["prompt"] + completed) + head * completed)
    speed = {"completion tokens per second": completed / seconds}
    return speed | _parts(limits, model.dtype, seconds, operations=operations)


def _parts(
    limits: Mapping[str, object], dtype: torch.dtype, seconds: float, *, operations: float, read: float | None = None
) -> dict[str, float]:
    """Which part of the limits this was."""
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
    """Wall seconds of ``job``, after a warm-up."""
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
    """Bytes at most since ``_reset_peak``; of a CPU, of the process so far; of MPS, now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    try:
        import resource
    except ImportError:  # a system without it
        return None
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
