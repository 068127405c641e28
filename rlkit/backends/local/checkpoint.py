"""The local backend's part of a saved state: the adapter in peft's own format, the optimizer as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from rlkit.backends.samplers import ADAPTER, LoraAdapter
from rlkit.errors import CheckpointError, ConfigError
from rlkit.types import Lora

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = [
    "ADAPTER",
    "adapter_in",
    "check_finite",
    "lora_of",
    "read_adapter",
    "read_optimizer",
    "trained_adapter",
    "write_adapter",
    "write_optimizer",
]

_OPTIMIZER = "optimizer.safetensors"
_IN_PEFT = "base_model.model."  # what peft puts before the names of the base's modules
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError where one is not finite: such a state is never saved."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"save: {name} is not finite; nothing was saved, and earlier saves are unchanged")


def write_adapter(folder: Path, model: PeftModel) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``, as ``PeftModel.from_pretrained`` reads them."""
    adapter = trained_adapter(model)
    check_finite(adapter.tensors)
    adapter.save(folder)


def trained_adapter(model: PeftModel) -> LoraAdapter:
    """Return a copy of a peft model's adapter as it is."""
    tensors = {
        name.replace(".default.", "."): p.detach().to("cpu", copy=True).contiguous()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    config = model.peft_config["default"].to_dict() | {"inference_mode": True}
    # Sets come out in another order in each process.
    return LoraAdapter(tensors, {name: sorted(x) if isinstance(x, (set, list)) else x for name, x in config.items()})


def read_adapter(folder: Path, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Put a saved adapter into the parameters.

    Raises:
        CheckpointError: names or shapes are not those of this model's adapter.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / ADAPTER)
    names = {name: name.replace(".default.", ".") for name in parameters}
    if set(names.values()) != tensors.keys():
        odd = min(set(names.values()) ^ tensors.keys())
        raise CheckpointError(f"{folder} holds an adapter for another model or other modules; {odd!r} differs")
    for name, parameter in parameters.items():
        _copy(parameter.data, tensors[names[name]], f"{folder}: {name}")


def adapter_in(
    folder: Path, model: torch.nn.Module, device: torch.device
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Read a saved adapter: full module name in the base -> (A [r, in], B [out, r]).

    Raises:
        CheckpointError: it is the adapter of another model.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / ADAPTER, device=str(device))
    modules: dict[str, torch.nn.Module] = dict(model.named_modules())
    adapter = {}
    for key in tensors:
        name, _, part = key.removeprefix(_IN_PEFT).partition(".lora_")
        if name in adapter:
            continue
        module, halves = modules.get(name), (f"{_IN_PEFT}{name}.lora_A.weight", f"{_IN_PEFT}{name}.lora_B.weight")
        if not part or module is None or not all(half in tensors for half in halves):
            raise CheckpointError(f"{folder} holds an adapter for another model or other modules; {key!r} differs")
        a, b = (tensors[half] for half in halves)
        sizes = sorted(module.weight.shape)  # some libraries' modules keep [in, out]
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or sorted((a.shape[1], len(b))) != sizes:
            raise CheckpointError(
                f"{folder}: {key} has shape {tuple(tensors[key].shape)}, which does not fit the model"
            )
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise CheckpointError(f"{folder}: {key} is not finite")
        adapter[name] = (a.float(), b.float())
    return adapter


def write_optimizer(
    folder: Path, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Write AdamW's moments and step count for each parameter; nothing before the first step."""
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = value.detach().cpu().contiguous()
    check_finite(tensors)
    save_file(tensors, folder / _OPTIMIZER)


def read_optimizer(
    folder: Path, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Put saved moments into the optimizer.

    Raises:
        CheckpointError: the state was saved without its optimizer, or its tensors are not this model's.
    """
    from safetensors.torch import load_file

    file = folder / _OPTIMIZER
    if not file.exists():
        raise CheckpointError(f"{folder} was saved without its optimizer; use init_from= for the weights alone")
    tensors = load_file(file)
    if not tensors:
        return  # saved before the first step
    for name, parameter in parameters.items():
        state = {}
        for key in _MOMENTS:
            if f"{name}.{key}" not in tensors:
                raise CheckpointError(f"{file} lacks {name}.{key}")
            value = tensors[f"{name}.{key}"]
            like = torch.zeros((), dtype=torch.float32) if key == "step" else torch.zeros_like(parameter)
            state[key] = _copy(like.to(parameter.device), value, f"{file}: {name}.{key}")
        optimizer.state[parameter] = state


def lora_of(state: Mapping[str, Any], lora: Lora | None) -> Lora:
    """Return the adapter's shape as saved; one that the user gives must be the same."""
    try:
        fields = dict(state["lora"])
        saved = Lora(**{**fields, "target_modules": fields["target_modules"] and tuple(fields["target_modules"])})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the saved state has no valid LoRA settings: {error}") from error
    if lora is not None and lora.train_unembed is None:
        lora = attrs.evolve(lora, train_unembed=saved.train_unembed)
    if lora is not None and attrs.evolve(lora, seed=None) != attrs.evolve(saved, seed=None):
        raise ConfigError(f"lora={lora} contradicts the saved adapter, which is {saved}; leave lora out")
    return saved


def _copy(target: torch.Tensor, source: torch.Tensor, where: str) -> torch.Tensor:
    if target.shape != source.shape:
        raise CheckpointError(f"{where} has shape {tuple(source.shape)}; expected {tuple(target.shape)}")
    if not torch.isfinite(source).all():
        raise CheckpointError(f"{where} is not finite")
    return target.copy_(source)
