"""A model in training that vLLM samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlkit.backends.local.checkpoint import trained_adapter
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.lora import adapter_of
from rlkit.backends.local.training.own_logprobs import OwnLogprobs, loud
from rlkit.backends.local.training.trainer import LocalTrainer
from rlkit.backends.sampling import SeedStream
from rlkit.backends.vllm.settings import Vllm
from rlkit.errors import ConfigError
from rlkit.types import Lora

if TYPE_CHECKING:
    from rlkit.backends.vllm.engine import VllmEngine

__all__ = ["served_by"]

_STRENGTHS = (0.03, 0.1, 0.3, 1.0)  # of the trial's adapter beside the weights, about


def served_by(
    settings: Vllm, base: Base, dtype: str, lora: Lora, peft: Any, trainer: LocalTrainer, seeds: SeedStream
) -> VllmEngine:
    """Return servers that sample the policy, after an adapter that is no policy has shown that adapters arrive.

    A policy's own adapter begins at zero, and changes little by little: one that never arrived would be seen late.

    Raises:
        ConfigError: vLLM cannot serve such a policy.
        BackendError: a server refuses the trial's adapter, or computes other logprobs with it than the trainer.
    """
    from rlkit.backends.vllm.engine import Trained, VllmEngine

    head, names = base.model.get_output_embeddings(), adapter_of(peft)
    if any(base.model.get_submodule(name) is head for name in names):
        raise ConfigError("sampler='vllm': vLLM serves no adapter on the output head; leave it out of target_modules")
    engine = VllmEngine(
        settings,
        Trained(
            model=base.path,
            dtype=dtype,
            lora=lora,
            modules=list({name.rpartition(".")[2] for name in names}),
            tokenizer=base.tokenizer,
            max_length=base.max_length,
            seeds=seeds,
            logprobs=OwnLogprobs(trainer),
        ),
    )
    try:
        for strength in _STRENGTHS:
            with loud(trainer, lora, strength):
                if engine.try_adapter(trained_adapter(peft)):
                    break
    except BaseException:
        engine.close()
        raise
    return engine
