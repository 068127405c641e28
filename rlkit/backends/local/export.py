"""A saved policy for other libraries: its adapter in peft's format, or merged into its base."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from rlkit.backends import saves
from rlkit.backends.early import SMOLLM2
from rlkit.backends.local import LocalBackend
from rlkit.backends.local.model.hub import announces_tied, public_name
from rlkit.backends.samplers import ADAPTER
from rlkit.errors import CheckpointError

if TYPE_CHECKING:
    from rlkit.backends.local.sampling.sampler import LocalSampler

__all__ = ["save_adapter", "save_merged"]

_CONFIG = "adapter_config.json"


def save_adapter(path: str, folder: str) -> list[str]:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, which peft's ``from_pretrained`` reads.

    The base is named by its hub id where that is known, so that the adapter loads on other machines.

    Args:
        path: what ``save`` returned.
        folder: a folder that is not there yet.

    Returns:
        What others must know to use it, a line each.

    Raises:
        CheckpointError: ``path`` is not a saved state, or ``folder`` exists or cannot be written.
    """
    from safetensors import safe_open

    target = _new_folder("save_adapter", folder)
    source, state = saves.read(path, backend="local")
    model = str(state["model"])
    base = public_name(model)
    try:
        config = json.loads((source / _CONFIG).read_text("utf-8"))
        config["base_model_name_or_path"] = base
        with safe_open(source / ADAPTER, framework="numpy") as tensors:
            names = list(tensors.keys())
        target.mkdir(parents=True)
        shutil.copyfile(source / ADAPTER, target / ADAPTER)
        (target / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), "utf-8")
    except OSError as error:
        raise CheckpointError(f"save_adapter: could not write {target}: {error}") from error
    notes = []
    on_head = any(not any(part.isdigit() for part in name.split(".")) for name in names)  # outside of all layers
    if on_head and announces_tied(model) is not False:
        notes.append("it has an adapter on a tied output head: merge with --merged; vLLM cannot serve it")
    if Path(base).is_absolute():
        notes.append(f"its base is {base}, a folder on this machine: edit base_model_name_or_path to use it on another")
    elif base != model:
        note = f"its base is {base}"
        quantised = ", whose weights differ slightly from the quantised weights used here" if SMOLLM2 in model else ""
        notes.append(f"{note}{quantised}")
    return notes


def _new_folder(call: str, folder: str) -> Path:
    if (target := Path(folder)).exists():
        raise CheckpointError(f"{call}: {target} exists already; name a new folder")
    return target


@torch.no_grad()
def save_merged(path: str, folder: str, *, model: str | None = None) -> str:
    """Write the base with the saved adapter in its weights, and the tokenizer, to ``folder``.

    A head that the base ties to its embedding gets its own weights, since the adapter is on the head alone;
    ``tie_word_embeddings`` is then False in the new config.

    Args:
        path: what ``save`` returned.
        folder: a folder that is not there yet.
        model: the base; None is the one that the state was trained on.

    Returns:
        ``folder``.

    Raises:
        CheckpointError: ``path`` is not a saved state, or ``folder`` exists or cannot be written.
    """
    target = _new_folder("save_merged", folder)
    _, state = saves.read(path, backend="local")
    with LocalBackend(model=model or state["model"], dtype=state["dtype"], init_from=path, device="cpu") as policy:
        snapshot, base = cast("LocalSampler", policy.sampler().result()).snapshot, policy.base
        tree = base.tree()
        head = tree.get_output_embeddings()
        modules = dict(tree.named_modules())
        for name, (a, b) in snapshot.adapter.items():
            module = modules[name]
            delta = (b.float() @ a.float()) * snapshot.scale
            if not isinstance(module, torch.nn.Linear):  # transformers' Conv1D keeps [in, out]
                delta = delta.T
            merged = (module.weight.float() + delta).to(module.weight.dtype)
            module.weight = torch.nn.Parameter(merged, requires_grad=False)
        if head.weight is not tree.get_input_embeddings().weight:
            tree.config.tie_word_embeddings = False
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
                whole = Path(temporary) / "model"
                tree.save_pretrained(whole)
                base.tokenizer.hf.save_pretrained(whole)
                whole.rename(target)
        except OSError as error:
            raise CheckpointError(f"save_merged: could not write {target}: {error}") from error
    return str(target)
