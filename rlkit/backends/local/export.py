"""A saved adapter merged into its base, as a model directory that needs neither rlkit nor peft."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from rlkit.backends import saves
from rlkit.backends.local import LocalBackend
from rlkit.backends.local.model.forward import merged_weight
from rlkit.errors import CheckpointError

__all__ = ["save_merged"]


@torch.no_grad()
def save_merged(path: str, folder: str, *, model: str | None = None) -> str:
    """Write the base with the saved adapter in its weights, and the tokenizer, to ``folder``.

    A head that the base ties to its embedding gets weights of its own, since the adapter is on the head alone;
    ``tie_word_embeddings`` is then False in the new config.

    Args:
        path: what ``save`` returned.
        folder: a folder that is not there yet.
        model: the base; None is the one that the state was trained on.

    Returns:
        ``folder``.

    Raises:
        CheckpointError: ``path`` is no saved state, or ``folder`` exists or cannot be written.
    """
    target = Path(folder)
    if target.exists():
        raise CheckpointError(f"save_merged: {target} exists already; name a new folder")
    _, state = saves.read(path, backend="local")
    with LocalBackend(model=model or state["model"], dtype=state["dtype"], init_from=path, device="cpu") as policy:
        sampler: Any = policy.sampler().result()
        snapshot, base = sampler.snapshot, policy.base
        tree: Any = base.tree()
        head = tree.get_output_embeddings()
        modules = dict(tree.named_modules())
        for name, (a, b) in snapshot.adapter.items():
            module = modules[name]
            module.weight = torch.nn.Parameter(merged_weight(module, a, b, snapshot.scale), requires_grad=False)
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
