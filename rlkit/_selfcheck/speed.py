"""The speed of decoding and training on a device, and its share of what memory and products allow.

A decoding step has to read every weight and the keys and values of every row; training computes each weight once
forward and once backward for a token, and the head for the completions' tokens. The limits are measured here, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit._selfcheck import numbers
from rlkit.backends.local import LocalBackend
from rlkit.backends.local.cache.kv_cache import CachedTokens, KVCache
from rlkit.backends.local.model.base import Base, load_base
from rlkit.backends.local.model.forward import LlamaForward
from rlkit.backends.local.model.memory import default_dtype
from rlkit.backends.local.products.lora_linear import LoraPair
from rlkit.backends.local.training.micro_batches import pack
from rlkit.types import Adam, Datum, Lora, Sample, SamplingParams

__all__ = ["Launches", "decode", "measured", "of_a_layer", "roofline", "train"]

# Views, and memory that is not written: nothing is launched for them.
_FREE = """
view _unsafe_view _reshape_alias t transpose permute expand slice select split split_with_sizes unsqueeze squeeze
as_strided detach alias empty empty_like new_empty empty_strided new_empty_strided unbind unfold diagonal
"""
FREE = frozenset(_FREE.split())


class Launches(TorchDispatchMode):  # type: ignore[misc]  # which torch does not type
    """A recorder of the operations that a device executes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.names: list[str] = []
        self._device = device

    def __torch_dispatch__(
        self,
        operation: torch.ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        kwargs = kwargs or {}
        name = str(operation.name()).partition("::")[2].partition(".")[0]
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]  # noqa: SLF001
        if name not in FREE and any(x.device == self._device for x in tensors):
            self.names.append(name)
            self.look(name, tensors, kwargs)
        return operation(*args, **kwargs)

    def look(self, name: str, tensors: list[torch.Tensor], kwargs: Mapping[str, object]) -> None:
        """Look at one operation; tests refuse some."""


def decode(base: Base, watch: Launches, *, merge: bool) -> list[str]:
    """Return the operations of one decoding step of 3 rows."""
    forward, cache = LlamaForward(base), KVCache()
    forward.load(_adapter(base), 0.5, merge=merge)
    cache.reserve(3, 40)
    tokens, positions = (torch.zeros(3, 1, dtype=torch.int64, device=base.device) for _ in range(2))
    index = torch.arange(3, device=base.device)
    with torch.no_grad():
        for mode in (torch.no_grad(), watch):  # keys and values get their memory in the first
            with mode:
                mask = cache.at(0, positions, 40)
                forward.logits(CachedTokens(tokens, positions, mask, cache, index))
    return watch.names


def train(base: Base, watch: Launches) -> list[str]:
    """Return the operations of the forward and backward pass of a micro-batch, which is a tree."""
    adapter = {name: (a.requires_grad_(), b.requires_grad_()) for name, (a, b) in _adapter(base).items()}
    forward = LlamaForward(base, adapter, 0.5)
    forward.prepare()
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 200, 10)
    (batch,) = pack([Datum.supervised(prompt, rng.integers(3, 200, 5)) for _ in range(3)], 1024)
    ids = torch.zeros(batch.index.size, dtype=torch.int64, device=base.device)
    for mode in (torch.enable_grad(), watch):  # what is compiled is compiled in the first
        with mode:
            out = forward.outputs(batch, {"logprobs": ids}, None)["logprobs"]
            out.backward(torch.ones_like(out))
    return watch.names


def of_a_layer(folder: Path, device: torch.device) -> dict[str, object]:
    """Return operations per layer: those that a third layer adds to two."""
    dtype = default_dtype(device)
    bases = [load_base(str(numbers.build("tiny", folder / f"{n}", layers=n)), dtype, device) for n in (2, 3)]
    if not all(base.llama for base in bases):
        return {"left out": "rlkit's forward is not used on this device"}
    ways: dict[str, Callable[[Base], list[str]]] = {
        "decoding, merged": lambda base: decode(base, Launches(device), merge=True),
        "decoding": lambda base: decode(base, Launches(device), merge=False),
        "training": lambda base: train(base, Launches(device)),
    }
    return {name: len(way(bases[1])) - len(way(bases[0])) for name, way in ways.items()}


def _adapter(base: Base, rank: int = 4) -> dict[str, LoraPair]:
    """Make an adapter on all products of the layers and on the head."""
    pairs = {}
    for name, module in base.model.named_modules():
        if name.endswith("_proj") or name == "lm_head":
            out, width = module.weight.shape
            pairs[name] = torch.zeros(rank, width, device=base.device), torch.zeros(out, rank, device=base.device)
    return pairs


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


def measured(
    model: Path, device: torch.device, parts: Mapping[str, Mapping[str, object]], time_left: Callable[[], bool]
) -> dict[str, object]:
    """Return tokens per second of decoding and training, their shares of the limits, and peaks of memory.

    Args:
        model: a folder.
        device: where.
        parts: with "roofline".
        time_left: whether more may begin.
    """
    load = SMALL if device.type == "cpu" else LARGE
    limits = parts.get("roofline", {})
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
                if time_left():
                    name = f"decoding {rows} row{'s' * (rows > 1)}{how}"
                    found[name] = _decoding(policy, device, rows, load, limits)
            found[f"{peak}, decoding{how}"] = _peak(device)
            if not graphs and time_left():
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
