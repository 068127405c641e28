"""``LocalCritic``: a language model with a value head and its own LoRA, in this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import nn

from rlkit.backends import saves
from rlkit.backends.local.checkpoint import (
    ADAPTER,
    check_finite,
    read_adapter,
    read_optimizer,
    write_optimizer,
)
from rlkit.backends.local.checks import resolve_model
from rlkit.backends.local.model.base import load_base
from rlkit.backends.local.model.lora import adapter_seed, with_adapter
from rlkit.backends.local.model.memory import micro_batch_tokens_for
from rlkit.backends.local.training.forward import training_forward
from rlkit.backends.local.training.trainer import LocalTrainer
from rlkit.backends.options import ModelOptions, takes
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.trainer import InProcessCritic, check_tokenizer
from rlkit.errors import CheckpointError
from rlkit.types import Adam, Datum

if TYPE_CHECKING:
    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = ["LocalCritic"]


class LocalCritic(InProcessCritic):
    """A causal language model whose last hidden state before a token gives that token's value.

    The base is frozen and shared with every backend of this process that has it; trained are a LoRA on its attention
    and MLP, and the head [hidden] -> 1, which begins at 0.

    Args:
        tokenizer: the policy's; the model's must give the same ids.
        options: those of ``rlkit.backends.options.ModelOptions``. ``lora.train_unembed`` has no effect, and ``seed`` is
            of the adapter's start alone.

    Raises:
        ConfigError: an option is out of range or contradicts a saved state, the model cannot be loaded, or its
            tokenizer is different.
        CheckpointError: the saved path is missing, damaged, or not a critic's.
    """

    @takes(ModelOptions)
    def __init__(self, *, tokenizer: Tokenizer, **options: Any) -> None:
        asked = ModelOptions(**options)
        lora = asked.lora and attrs.evolve(asked.lora, train_unembed=False)  # its output is ignored
        resolved = resolve_model(attrs.evolve(asked, lora=lora), "local-critic")
        saved, dtype, lora = resolved.saved, resolved.dtype, attrs.evolve(resolved.lora, train_unembed=False)
        base = load_base(resolved.model, dtype, resolved.device)
        tokens = int(resolved.options.micro_batch_tokens or micro_batch_tokens_for(base))
        check_tokenizer(tokenizer, base.tokenizer)
        self._lora = lora
        self._settings = {"model": resolved.model, "dtype": dtype, "micro_batch_tokens": tokens}
        peft = with_adapter(base, lora, adapter_seed(lora, resolved.entropy), fresh=saved is None)
        peft.value_head = _value_head(peft, base.device)
        forward = training_forward(peft, base, tokens)
        self._trainer = LocalTrainer(peft, base.device, tokens, forward, peft.value_head)
        version = 0
        if saved is not None:
            with saves.restoring(saved[0]):
                version = self._load(*saved, optimizer=resolved.resumes)
        super().__init__(
            "local-critic", tokenizer=base.tokenizer, max_length=base.max_length, folder=asked.folder, version=version
        )

    def _compute_values(
        self, data: Sequence[Datum], loss: PreparedLoss | None, *, backward: bool
    ) -> Generator[None, None, tuple[Sequence[np.ndarray], Sequence[LossGradient]]]:
        output, parts = yield from self._trainer.run(data, loss, (), backward=backward)
        return [v.numpy() for v in output["values"]], parts

    def _step(self, params: Adam) -> Mapping[str, float]:
        return self._trainer.step(params)

    def _drop(self) -> None:
        self._trainer.clear()

    def _write(self, folder: Path, *, optimizer: bool) -> dict[str, object]:
        from safetensors.torch import save_file

        parameters = self._trainer.parameters
        check_finite(parameters)
        tensors = {name.replace(".default.", "."): p.detach().cpu().contiguous() for name, p in parameters.items()}
        save_file(tensors, folder / ADAPTER)
        if optimizer:
            write_optimizer(folder, parameters, self._trainer.optimizer)
        return {"lora": attrs.asdict(self._lora), "optimizer": optimizer, **self._settings}

    def _load(self, folder: Path, state: Mapping[str, Any], *, optimizer: bool) -> int:
        read_adapter(folder, self._trainer.parameters)
        if not optimizer:
            return 0
        read_optimizer(folder, self._trainer.parameters, self._trainer.optimizer)
        try:
            return int(state["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: its state lacks the version: {error}") from error


def _value_head(model: nn.Module, device: torch.device) -> nn.Linear:
    width = model.get_output_embeddings().weight.shape[-1]
    head = nn.utils.skip_init(nn.Linear, width, 1, device=device, dtype=torch.float32)  # draws no random numbers
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head
