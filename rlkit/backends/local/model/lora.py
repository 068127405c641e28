"""Which modules get an adapter, and the peft model that has exactly those."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from torch import nn

from rlkit._runtime import warn
from rlkit.backends.local.model.base import PROCESS_WIDE, Base
from rlkit.backends.local.products.linear import adapter_of
from rlkit.errors import ConfigError, UnsupportedError
from rlkit.types import Lora

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

__all__ = ["adapter_seed", "decide_head", "describe_lora", "is_tied", "lora_targets", "with_adapter"]

ROUTERS = {"router", "gate", "shared_expert_gate"}  # parts of the names of what chooses experts


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether a model's output head is its input embedding."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def decide_head(lora: Lora, base: Base) -> Lora:
    """Return the adapter's shape with ``train_unembed=None`` replaced by what it means on this model.

    Raises:
        ConfigError: that leaves nothing to train.
    """
    if lora.train_unembed is not None:
        return lora
    tied = is_tied(base.model)
    if tied and lora.target_modules is None and not (lora.train_mlp or lora.train_attn):
        raise ConfigError(
            "Lora", "adapts only the output head, which this model ties to its embedding", "train_unembed=True"
        )
    return attrs.evolve(lora, train_unembed=not tied)


def describe_lora(lora: Lora) -> str:
    """Return rank and layers of an adapter, without commas."""
    flags = {"attention": lora.train_attn, "MLP": lora.train_mlp, "output head": lora.train_unembed}
    return f"LoRA r={lora.rank} on {' + '.join(lora.target_modules or [name for name, on in flags.items() if on])}"


def lora_targets(base: Base, lora: Lora) -> list[str]:
    """Return the full names of the linear modules that get an adapter.

    The output embedding is "unembed"; of the others, those on a path with "attn" or "attention" are attention, the
    rest is MLP. Routers get one only if ``target_modules`` names them. ``train_unembed`` has been decided.

    Raises:
        ConfigError: a name of ``target_modules`` is not a linear module, or one whose adapter would have no effect.
        UnsupportedError: nothing matches.
    """
    model = base.model
    names = [name for name, _ in model.named_modules() if name in base.linear and not _unusable(model, name)]
    if lora.target_modules is not None:
        for target in lora.target_modules:
            if not any(_named(name, target) for name in names):
                raise ConfigError(_no_target(model, target, names))
        return [name for name in names if any(_named(name, target) for target in lora.target_modules)]
    head = model.get_output_embeddings()
    wanted = [name for name in names if _wants(lora, name, is_head=model.get_submodule(name) is head)]
    if not wanted:
        why = "; its experts are stacked parameters, which adapters do not support yet" if _experts(model) else ""
        raise UnsupportedError(f"{lora}: the model has no such linear modules; it has: {_listed(names)}{why}")
    return wanted


def _wants(lora: Lora, name: str, *, is_head: bool) -> bool | None:
    parts = name.split(".")
    if is_head:
        return lora.train_unembed
    if ROUTERS & set(parts):
        return False
    return lora.train_attn if any("attn" in part or "attention" in part for part in parts) else lora.train_mlp


def with_adapter(base: Base, lora: Lora, seed: int, *, fresh: bool = True) -> PeftModel:
    """Return a tree of ``base`` with a fresh LoRA as a peft model; the global random state is left as it was.

    A is uniform in +-1/sqrt(d_in) from ``seed``, B is zero, both float32. The head of a model with tied embeddings
    gets its adapter on the head alone. Where it is ``fresh``, that is not one that was saved, experts that get no
    adapter are warned of.

    Raises:
        ConfigError: see ``lora_targets``; or the rank is beyond every layer, or peft puts adapters elsewhere than on
            the modules that were named.
        UnsupportedError: see ``lora_targets``.
    """
    names = lora_targets(base, lora)
    widest = max(max(base.model.get_submodule(name).weight.shape) for name in names)
    if lora.rank > widest:
        raise ConfigError("lora.rank", f"is {lora.rank}", f"at most {widest}", "the widest layer that it adapts")
    model = _peft_model(base, lora, names)
    odd = _odd(model, names)
    missing = odd & set(names)
    if missing and lora.target_modules is None:  # peft takes names of dense layers for experts
        short = {_last(name) for name in missing}
        names = [name for name in names if _last(name) not in short]
        if not names:
            raise ConfigError(_rewritten(base, lora, missing))
        model = _peft_model(base, lora, names)
        odd = _odd(model, names)
    if odd:
        raise ConfigError(_rewritten(base, lora, odd))
    if fresh and lora.train_mlp and lora.target_modules is None and (missing or _experts(base.model)):
        warn(_left_out(base, names, missing))
    _draw(model, seed)
    return model


def _draw(model: PeftModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_A" in name:
            bound = parameter.shape[1] ** -0.5
            parameter.data.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
        elif parameter.requires_grad:
            parameter.data.zero_()


def adapter_seed(lora: Lora, entropy: int) -> int:
    """Return the seed of the adapter's start: its own, or one that follows from the backend's."""
    if lora.seed is not None:
        return lora.seed
    words = np.random.SeedSequence(entropy, spawn_key=(0,)).generate_state(2, np.uint32)
    return int.from_bytes(words.tobytes(), "little")


def _peft_model(base: Base, lora: Lora, names: list[str]) -> PeftModel:
    import peft

    short = {_last(name) for name in names}
    hit = [name for name, _ in base.model.named_modules() if any(_named(name, x) for x in short)]
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(short) if set(hit) == set(names) else names,
        task_type="CAUSAL_LM",
    )
    with PROCESS_WIDE, torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied heads and Conv1D layers, both meant and both tested
        try:
            return peft.get_peft_model(base.tree(), config).eval()
        except (ValueError, TypeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0][:300]
            raise ConfigError(f"{lora}: peft cannot adapt {_listed(names)} of {_kind(base)}: {reason}") from error


def _odd(model: PeftModel, names: Iterable[str]) -> set[str]:
    """Return the modules whose adapter is missing, was not asked for, or would be lost by peft when it loads.

    For peft renames what was saved as it renames the model's checkpoints.
    """
    import peft

    pairs = adapter_of(model)
    saved = {
        f"base_model.model.{name}.lora_{x}.weight": tensor.detach()
        for name, pair in pairs.items()
        for x, tensor in zip("AB", pair, strict=True)
    }
    with PROCESS_WIDE, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the missing modules, which is the question here
        lost = peft.set_peft_model_state_dict(model, saved).missing_keys
    return (set(names) ^ pairs.keys()) | {name for name in pairs if any(f".{name}.lora_" in key for key in lost)}


def _unusable(model: nn.Module, name: str) -> bool:
    """Return whether a state-space mixer's kernel reads the weight past its module, and so past an adapter."""
    parent, _, last = name.rpartition(".")
    return last in ("out_proj", "dt_proj") and hasattr(model.get_submodule(parent), "A_log")


def _experts(model: nn.Module) -> bool:
    """Return whether it has experts whose weights are stacked in one parameter."""
    return any(
        "Experts" in type(m).__name__ and any(p.ndim == 3 for p in m.parameters(recurse=False)) for m in model.modules()
    )


def _no_target(model: nn.Module, target: str, names: Iterable[str]) -> str:
    there = [name for name, _ in model.named_modules() if _named(name, target)]
    if there:
        kind = type(model.get_submodule(there[0])).__name__
        return (
            f"lora: target_modules has {target!r}, which is {there[0]} ({kind}); expected linear modules that a "
            f"forward on text calls and that return a tensor (an adapter elsewhere has no effect): {_listed(names)}"
        )
    known = sorted({x for name in names for x in (name, _last(name))})
    close = difflib.get_close_matches(target, known, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"it has {_listed(names)}"
    return f"lora: target_modules has {target!r}, and the model has no such linear module; {hint}"


def _rewritten(base: Base, lora: Lora, odd: Iterable[str]) -> str:
    return (
        f"{lora}: {_listed(odd)} of {_kind(base)} share their names with its experts, so peft would put the adapters "
        "elsewhere; leave these modules out"
    )


def _left_out(base: Base, names: Iterable[str], missing: Iterable[str]) -> str:
    too = f", nor do {_listed(missing)}, which share their names" if missing else ""
    return f"{_kind(base)}: its experts get no adapter{too}; the trained modules are {_listed(names)}"


def _kind(base: Base) -> str:
    return f"the {base.model.config.model_type} model"


def _named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted({_last(name) for name in names}))
