"""``LocalCritic``: a language model with a value head and a LoRA of its own, in this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import nn

from rlkit import _check
from rlkit.backends import saves
from rlkit.backends.checking import Start
from rlkit.backends.local.checkpoint import (
    ADAPTER,
    check_finite,
    lora_of,
    read_adapter,
    read_optimizer,
    write_optimizer,
)
from rlkit.backends.local.model.base import load_base
from rlkit.backends.local.model.defaults import default_dtype, micro_batch_tokens_for
from rlkit.backends.local.model.device import device_of
from rlkit.backends.local.model.hub import located
from rlkit.backends.local.model.lora import adapter_seed, with_adapter
from rlkit.backends.local.training.forward import training_forward
from rlkit.backends.local.training.rows import existing_folder
from rlkit.backends.local.training.trainer import LocalTrainer
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.sampling import entropy_of
from rlkit.critics.inprocess import InProcessCritic, check_tokenizer
from rlkit.errors import CheckpointError, ConfigError
from rlkit.types import Adam, Datum, Lora

if TYPE_CHECKING:
    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = ["LocalCritic"]


class LocalCritic(InProcessCritic):
    """A causal language model whose last hidden state before a token gives that token's value.

    The base is frozen and shared with every backend of this process that has it; what is trained is a LoRA on its
    attention and MLP, and the head [hidden] -> 1, which begins at 0.

    Args:
        tokenizer: the policy's; the model's must give the same ids.
        model: "smollm2-135m-instruct", a directory, or a hub id; None is the one that a saved path was trained on.
        lora: the adapter; None is ``Lora()``, or the saved one's shape. ``train_unembed`` does nothing here.
        seed: of the adapter's start; None for a fresh one.
        folder: where ``save`` writes, ``rlkit-saves`` by default.
        resume_from: a saved path: weights, optimizer and version.
        init_from: a saved path: weights only.
        dtype, device, micro_batch_tokens, offload_folder: as for the local backend.

    Raises:
        ConfigError: an option is out of range or contradicts a saved state, the model cannot be loaded, or its
            tokenizer is another one.
        CheckpointError: the saved path is missing, damaged, or not a critic's.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        model: str | None = None,
        lora: Lora | None = None,
        seed: int | None = None,
        folder: str | Path | None = None,
        resume_from: str | None = None,
        init_from: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        micro_batch_tokens: int | None = None,
        offload_folder: str | Path | None = None,
    ) -> None:
        start = Start.of("critic", model, lora, folder, resume_from, init_from)
        _check.optional(_check.integer, "micro_batch_tokens", micro_batch_tokens, low=1)
        rows_in = existing_folder(offload_folder)
        saved = saves.read(start.path, backend="local-critic") if start.path is not None else None
        if model is None and saved is not None:
            model = saved[1].get("model")
        if model is None:
            raise ConfigError("model: give a directory, a hub id, or 'smollm2-135m-instruct'")
        lora = None if lora is None else attrs.evolve(lora, train_unembed=False)  # its output is not looked at
        lora = lora_of(saved[1], lora) if saved is not None else lora or Lora(train_unembed=False)
        place, resumed = device_of(device), saved[1] if saved is not None and start.resumes else {}
        if dtype is None:
            dtype = str(resumed.get("dtype") or default_dtype(place))
        base = load_base(model, dtype, place)
        micro_batch_tokens = int(
            micro_batch_tokens or resumed.get("micro_batch_tokens") or micro_batch_tokens_for(base)
        )
        check_tokenizer(tokenizer, base.tokenizer)
        self._lora = lora
        self._settings = {"model": located(model), "dtype": dtype, "micro_batch_tokens": micro_batch_tokens}
        peft = with_adapter(base, lora, adapter_seed(lora, entropy_of(seed)), fresh=saved is None)
        peft.value_head = _value_head(peft, base.device)
        forward = training_forward(peft, base, lora.alpha / lora.rank, micro_batch_tokens, rows_in)
        self._trainer = LocalTrainer(peft, base.device, micro_batch_tokens, forward, peft.value_head)
        version = 0
        if saved is not None:
            with saves.restoring(saved[0]):
                version = self._load(*saved, optimizer=start.resumes)
        super().__init__(
            "local-critic", tokenizer=base.tokenizer, max_length=base.max_length, folder=folder, version=version
        )

    def _values_and_parts(
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


def _value_head(model: Any, device: torch.device) -> nn.Linear:
    width = model.get_output_embeddings().weight.shape[-1]
    head = nn.utils.skip_init(nn.Linear, width, 1, device=device, dtype=torch.float32)  # draws no random numbers
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head
