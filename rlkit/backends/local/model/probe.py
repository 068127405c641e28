"""Tokens on which the ways to compute a model are compared with its own forward, before any of them is taken.

What passed on this machine before is remembered, so that ``connect`` does not repeat it: the self-checks of a model,
and the check of a device (``rlkit doctor --device``).

Whether two ways to compute a model agree follows from the model's files, from rlkit's and the library's code, and from
the processor with its settings. All of that is the key: when a part of it changes, everything is checked again. What
failed is never remembered, and a file that cannot be read or that another user wrote is ignored.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import json
import os
import platform
import re
import tomllib
import uuid
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlkit._fallback import Outcome
from rlkit._runtime import PACKAGE, VERSION, warn
from rlkit.backends.local.attention.tree import layer_windows, shorten, thresholds
from rlkit.backends.local.model.hub import cache_folder
from rlkit.backends.local.model.output_head import logits_to_keep

__all__ = [
    "BATCHED",
    "LLAMA",
    "NOT_CONTINUED",
    "SLOTS",
    "WHOLE",
    "Passed",
    "Probe",
    "causal",
    "checks_folder",
    "key_of",
    "logits_at",
    "note_tried",
    "probe_of",
    "trainable_linears",
    "warn_untried",
]


_KEPT = 200  # files; older ones are of models, versions and settings that are gone
_SETTINGS = ("ATEN_CPU_CAPABILITY", "DNNL_", "MKL_", "ONEDNN_", "OMP_", "TORCH_", "CUBLAS_")  # of other libraries


class Passed:
    """Names of checks that passed, with what they found.

    Args:
        key: of everything that a check depends on; None: nothing is remembered.
    """

    def __init__(self, key: dict[str, object] | None = None) -> None:
        folder = checks_folder()
        self._key, self._found = key, dict[str, object]()
        self._file: Path | None = None
        if key is None or folder is None:
            return
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        file = self._file = folder / f"{digest[:32]}.json"
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            if os.name != "nt" and file.stat().st_uid != os.getuid():
                return
            record = json.loads(file.read_text("utf-8"))
            if record["key"] == json.loads(json.dumps(key)):
                self._found = dict(record["passed"])

    def __call__(self, name: str, check: Callable[[], bool]) -> bool:
        """Return whether a check passed before, or passes now."""
        if self._found.get(name) is True:
            return True
        right = check()
        if right:
            self.note(name, True)
        return right

    def names(self, name: str, among: Iterable[str]) -> frozenset[str] | None:
        """Return the names that a check recorded; None if one of them is not in ``among``."""
        found = self._found.get(name)
        if not isinstance(found, list) or not all(isinstance(x, str) for x in found) or not set(found) <= set(among):
            return None
        return frozenset(found)

    def note(self, name: str, found: object) -> None:
        """Remember what a check found that passed; a cache that cannot be written does not stop the program."""
        self._found[name] = found
        if self._file is None:
            return
        partial = self._file.with_name(f".{self._file.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                partial.write_text(json.dumps({"key": self._key, "passed": self._found}, indent=1), "utf-8")
                partial.replace(self._file)
                for old in sorted(self._file.parent.glob("*.json"), key=lambda x: x.stat().st_mtime)[:-_KEPT]:
                    old.unlink(missing_ok=True)
            finally:
                partial.unlink(missing_ok=True)


def checks_folder() -> Path | None:
    """Return where they are kept; None: nowhere."""
    return cache_folder() / "checks"


def key_of(model: PreTrainedModel, files: object, dtype: str, device: torch.device) -> dict[str, object] | None:
    """Return all that decides on the outcome of a model's checks; None where the model's files are not known.

    Args:
        model: as it was loaded.
        files: names, sizes and times of a folder's; () for a hub id, whose commit the model knows.
        dtype, device: of the model.
    """
    commit = getattr(model.config, "_commit_hash", None)
    if not files and not commit:
        return None
    cuda = device.type == "cuda"
    return {
        "model": files or [model.name_or_path, commit],
        "code": _code_of(model),
        "attention": model.config._attn_implementation,  # noqa: SLF001  # no public name
        "dtype": dtype,
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "rlkit": _source(),
        "versions": _versions(),
        "processor": [platform.machine(), *_processor(), torch.backends.cpu.get_cpu_capability()],
        "threads": torch.get_num_threads(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
        "precision": [torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled],
    }


def _versions() -> list[str]:
    import transformers

    return [torch.__version__, transformers.__version__, platform.python_version()]


@functools.cache
def _source() -> str:
    """Return a digest of rlkit's own code and tables."""
    total = hashlib.sha256()
    for file in sorted(x for x in PACKAGE.rglob("*") if x.suffix in (".py", ".toml")):
        total.update(file.read_bytes())
    return total.hexdigest()


@functools.cache
def _processor() -> list[str]:
    """Return its name, and its instruction sets where the system lists them; libraries look at more than torch does."""
    with contextlib.suppress(OSError):
        fields = [line.partition(":") for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()]
        named = {name.strip(): value.strip() for name, _, value in reversed(fields)}  # those of the first one
        return [named.get(name, "") for name in ("model name", "flags", "Features")]
    return [platform.processor()]


def _code_of(model: PreTrainedModel) -> str:
    """Return a digest of what its modules run, which a program may have replaced."""
    total = hashlib.sha256()
    for kind in sorted({f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules()}):
        total.update(kind.encode())
    forwards = {id(code): code for m in model.modules() if (code := getattr(m.forward, "__code__", None)) is not None}
    for text in sorted(f"{c.co_qualname} {c.co_filename} {c.co_names} {c.co_code.hex()}" for c in forwards.values()):
        total.update(text.encode())
    return total.hexdigest()


SHORT, WINDOW = 9, 15
BUDGET = {"cpu": 10**12, "other": 10**14}  # operations of a forward at most: ten seconds of two cores
READ = {"cpu": 2 * 10**11, "other": 10**13}  # bytes of weights read at most for tokens one by one: ten seconds too
# In bfloat16 a small difference looks like rounding. So paths are tried there for the architectures alone that a
# measurement in float32 shows to agree (`make families`).
_FAMILIES = tomllib.loads(resources.files(__package__).joinpath("families.toml").read_text("utf-8"))
_KEYS = "slots", "batched", "whole", "not_continued"
SLOTS, BATCHED, WHOLE, NOT_CONTINUED = (frozenset[str](_FAMILIES[key]) for key in _KEYS)
LLAMA = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # whose residual stream can be in float32 alone


@attrs.frozen(eq=False)
class Probe:
    """What is computed to compare.

    Attributes:
        tokens: int64 [N], ordinary ones of the vocabulary.
        places: of logits that are compared: the first ones, those around each threshold, and the last ones.
        ends: lengths at which something may change, as far as N goes beyond them.
        beyond: whether N is beyond every length at which the config says that something may change; longer ones are
            left out where they would take more than ``BUDGET``.
        window: size that windows have in comparisons (``Base.trial``), where those of the model are too long to be
            tried; or None. Code is the same for windows of any size, and where the library has the size from
            elsewhere than rlkit, logits differ.
        steps: how many of the first tokens are decoded one by one.
        exact: whether the model is computed in float32 at least.
    """

    tokens: np.ndarray
    places: np.ndarray
    ends: list[int]
    beyond: bool
    window: int | None
    steps: int
    exact: bool

    def agrees(self, logits: torch.Tensor, expected: torch.Tensor, *, slack: float = 1.0) -> Outcome:
        """Return whether logits [n, V] are equal up to rounding: each row in float32, all together in bfloat16."""
        logits, expected = (_centred(x.cpu()) for x in (logits, expected))
        dim, bound = (-1, slack * 1e-4) if self.exact else (None, slack * 0.1)
        off, size = (x.norm(dim=dim) for x in (logits - expected, expected))
        reason = f"logits differ by {float((off / size).max()):.2g} > {bound:g}"
        return Outcome(bool((off <= bound * size).all()), reason)


def _centred(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [n, V] of the CPU less their means, in float64, which not every device has."""
    wide = logits.double()
    return wide - wide.mean(-1, keepdim=True)


def _window_sizes(config: PreTrainedConfig) -> set[int]:
    return {window.size for window in layer_windows(config) or () if window is not None}


def probe_of(model: PreTrainedModel, special: set[int], longest: int) -> Probe:
    """Return the probe of a model.

    Args:
        model: a causal language model.
        special: ids that represent no text, and perhaps an image.
        longest: tokens of its context.
    """
    size = model.get_input_embeddings().weight.shape[0]
    ordinary = np.setdiff1d(np.arange(size), np.array(sorted(special), np.int64))
    config = model.config.get_text_config()
    ends = thresholds(config, longest)
    operations = 2 * sum(p.numel() for p in model.parameters())
    size_in_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    kind = "cpu" if model.device.type == "cpu" else "other"
    budget, steps = BUDGET[kind], READ[kind] // size_in_bytes
    within = [end for end in ends if operations * (end + SHORT) <= budget]
    window, others = None, config
    if not _window_sizes(config) <= set(within):
        window, others = WINDOW, copy.deepcopy(config)
        shorten(others, WINDOW)
    beyond = all(end in within or end == window for end in thresholds(others, longest))
    length = min(max([*within, window or 0, 0]) + SHORT, longest)
    tokens = np.random.default_rng(0).choice(ordinary if ordinary.size else np.arange(size), length)
    around = [range(end - 1, end + 3) for end in [*within, window or 0]]
    places = sorted({*range(SHORT), *itertools.chain(*around), *range(length - 4, length)} & {*range(length)})
    steps = min(max(steps, 4), 64)
    return Probe(tokens, np.array(places), within, beyond, window, steps, model.dtype != torch.bfloat16)


def logits_at(model: PreTrainedModel, rows: np.ndarray, index: np.ndarray) -> torch.Tensor:
    """Return logits [n, V] at the flat ``index`` of ``rows`` [B, T], by the model's own forward."""
    tokens, places = (torch.from_numpy(x).to(model.device) for x in (rows, index))
    with logits_to_keep(model, places):
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0]
    return logits


@torch.no_grad()
def causal(model: PreTrainedModel, probe: Probe) -> Outcome:
    """Return whether a row's logits depend neither on later tokens nor on a longer row in the batch."""
    tokens, places = probe.tokens, probe.places
    other = tokens[::-1][:-3].copy()
    few = places[places < other.size]
    rows = np.stack([tokens, np.append(other, np.zeros(3, np.int64))])
    expected = [logits_at(model, tokens[None], places), logits_at(model, other[None], few)]
    beside = [logits_at(model, rows, np.concatenate([places, tokens.size + few]))]
    for length in (tokens.size // 2, tokens.size - 3):
        begin = places[places < length]
        beside.append(logits_at(model, tokens[None, :length], begin))
        expected.append(expected[0][: begin.size])
    return probe.agrees(torch.cat(beside), torch.cat(expected), slack=5)


def trainable_linears(model: PreTrainedModel, probe: Probe) -> frozenset[str]:
    """Return the names of the linear modules on which an adapter learns: their product enters the logits.

    Others are not called for text (a vision tower), are read past the module (a state-space mixer's ``dt_proj``), give
    something else than the product (routers of some kinds, products by groups), or only choose what is computed (an
    indexer), so that no gradient comes back. An expert may be idle for a few tokens and counts as its neighbours do.
    """
    linear = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and name}
    marks: dict[str, torch.Tensor] = {}  # a zero that is added to the output
    odd: set[str] = set()
    hooks = []
    for name, module in linear.items():

        def mark(module: nn.Module, args: tuple[object, ...], out: torch.Tensor, name: str = name) -> torch.Tensor:
            if not _is_product(module, args, out):
                odd.add(name)
                return out
            return out + marks.setdefault(name, out.new_zeros((), requires_grad=True))

        hooks.append(module.register_forward_hook(mark))
    try:
        with torch.enable_grad():
            tokens = torch.from_numpy(probe.tokens[None, :SHORT]).to(model.device)
            total = model(input_ids=tokens, use_cache=False).logits.float().sum()
            gradients = torch.autograd.grad(total, list(marks.values()), allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    learns = {name for name, gradient in zip(marks, gradients, strict=True) if gradient is not None} - odd
    patterns = {_pattern(name) for name in learns}
    experts = {name for name in linear.keys() - marks.keys() - odd if "expert" in name and _pattern(name) in patterns}
    return frozenset(name for name in learns | experts if linear[name].weight.is_floating_point())


@torch.no_grad()
def _is_product(module: nn.Module, args: tuple[object, ...], out: object) -> bool:
    """Return whether a linear module gave x W^T + b."""
    if not (args and isinstance(out, torch.Tensor) and out.is_floating_point()):
        return False
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
    if not weight.is_floating_point():
        return False
    product = nn.functional.linear(args[0], weight, module.bias)
    return product.shape == out.shape and bool((product - out).norm() <= 1e-2 * product.norm() + 1e-30)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


_warned: set[str] = set()


def warn_untried(device: torch.device) -> None:
    """Warn where this version was not checked on such a device, a CPU excepted, which its tests run on."""
    if device.type in ("cpu", "meta") or str(device) in _warned or _note(device).exists():
        return
    _warned.add(str(device))
    warn(
        f"this version of rlkit was not tested on this device yet; run `rlkit doctor --device {device}`, which takes a "
        "minute",
    )


def note_tried(device: torch.device) -> None:
    """Remember that all tests passed on such a device, with these versions."""
    file = _note(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_identity(device)) + "\n", "utf-8")
    except OSError:
        return  # a cache that cannot be written: the warning stays


def _identity(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "torch": torch.__version__, "rlkit": VERSION}


def _note(device: torch.device) -> Path:
    digest = hashlib.sha256(json.dumps(_identity(device)).encode()).hexdigest()
    return cache_folder() / "devices" / f"{digest[:16]}.json"
