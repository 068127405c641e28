"""From hidden states to what losses are driven by, a chunk of tokens at a time.

Logits of every token of a micro-batch would be [n, V] in memory, and their gradient once more. Where they are many, at
most ``CHUNK`` rows of them exist at once: each chunk is computed without keeping anything, and again in the backward
pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from rlkit.backends.local.model.tree_attention import Run
from rlkit.backends.local.training.forward import Body, LibraryBody, LlamaBody
from rlkit.backends.local.training.micro_batches import Batch

__all__ = ["Head"]

CHUNK = 256
KEPT = 2**26  # logits that are simply kept: 256 MB in float32, cheaper than computing them twice


class Head:
    """The model's output embedding, and what its architecture does to logits afterwards.

    Args:
        model: a causal language model, with or without an adapter.
        body: what comes before it.
    """

    main = "logprobs"  # the output that is always there

    def __init__(self, model: Any, body: Body) -> None:
        self._model = model
        self._config = model.config.get_text_config()
        self._splits: bool | None = None
        self.body = body

    def outputs(
        self, batch: Batch, wanted: Mapping[str, torch.Tensor | None], temperatures: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """What the losses of the n masked-in tokens of ``batch`` are driven by.

        Args:
            batch: a micro-batch.
            wanted: "logprobs" -> ids [n], "target_logprobs" -> ids [n, K] with -1 for none; "entropy",
                "sum_p2" and "sum_p2_logp" -> None.
            temperatures: float32 [n], or None where all are 1.

        Returns:
            name -> [n] or [n, K], float32.
        """
        if isinstance(self.body, LlamaBody):
            hidden, ids = self.body.hidden(batch), wanted["logprobs"]
            if len(wanted) == 1 and ids is not None:
                return {"logprobs": self.body.unembedding.logprobs(hidden, ids, temperatures)}
        else:
            if self._splits is None:
                self._splits = self._finishes_alike(self.body, batch)
            small = batch.index.size * self._config.vocab_size <= KEPT
            if small or not self._splits:
                logits = self.body.logits(batch)
                return dict(zip(wanted, _read(logits, list(wanted), list(wanted.values()), temperatures), strict=True))
            hidden = self.body.hidden(batch)
        parts: list[tuple[torch.Tensor, ...]] = []
        for start in range(0, hidden.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            ids_of_part = [None if x is None else x[part] for x in wanted.values()]
            warm = None if temperatures is None else temperatures[part]
            parts.append(self._chunk(hidden[part], list(wanted), ids_of_part, warm))
        return {name: torch.cat([part[k] for part in parts]) for k, name in enumerate(wanted)}

    def _chunk(
        self,
        hidden: torch.Tensor,
        names: Sequence[str],
        ids: Sequence[torch.Tensor | None],
        temperatures: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        def compute(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return _read(self._logits(hidden), names, ids, temperatures)

        if not torch.is_grad_enabled():
            return compute(hidden)
        result: tuple[torch.Tensor, ...] = checkpoint(
            compute, hidden, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
        return result

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V], with the scale or cap that some architectures apply."""
        if isinstance(self.body, LlamaBody):
            return self.body.unembedding.logits(hidden)
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        scale = getattr(self._config, "logit_scale", None)
        divisor = getattr(self._config, "logits_scaling", None)
        cap = getattr(self._config, "final_logit_softcapping", None)
        logits = logits * scale if scale else logits
        logits = logits / divisor if divisor else logits
        return torch.tanh(logits / cap) * cap if cap else logits

    @torch.no_grad()
    def _finishes_alike(self, body: LibraryBody, batch: Batch) -> bool:
        """Whether ``_logits`` is all that this architecture does after its last hidden state."""
        tokens = batch.tokens[:8]
        few = Batch([], tokens, np.arange(tokens.size), [Run(0, tokens.size)], np.arange(tokens.size))
        expected, found = body.logits(few), self._logits(body.hidden(few))
        return bool(torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())))


def _read(
    logits: torch.Tensor,
    names: Sequence[str],
    ids: Sequence[torch.Tensor | None],
    temperatures: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """What ``names`` ask for, from logits [n, V]."""
    logits = logits.float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    if list(names) == ["logprobs"]:
        return (-F.cross_entropy(logits, ids[0], reduction="none"),)
    logprobs = torch.log_softmax(logits, dim=-1)
    out = []
    for name, which in zip(names, ids, strict=True):
        if which is None:
            out.append(_of_distribution(name, logprobs))
        elif which.ndim == 1:
            out.append(logprobs.gather(1, which[:, None])[:, 0])
        else:
            out.append(logprobs.gather(1, which.clamp(min=0)).masked_fill(which < 0, 0.0))
    return tuple(out)


def _of_distribution(name: str, logprobs: torch.Tensor) -> torch.Tensor:
    """[n] from all logprobs [n, V]."""
    if name == "entropy":
        return -(logprobs.exp() * logprobs).sum(-1)
    squares = (2.0 * logprobs).exp()
    return squares.sum(-1) if name == "sum_p2" else (squares * logprobs).sum(-1)
