"""From hidden states to what losses are driven by, a chunk of tokens at a time.

Logits of every token of a micro-batch would be [n, V] in memory, and their gradient once more. Here at most ``CHUNK``
rows of them exist at once: each chunk is computed without keeping anything, and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlkit.backends.local.packing import pack
from rlkit.types import Datum

__all__ = ["Head", "plain_attention", "selected_hidden", "selected_logits"]

CHUNK = 256
KEPT = 2**26  # logits that are simply kept: 256 MB in float32, cheaper than computing them twice


class Head:
    """The model's output embedding, and what its architecture does to logits afterwards.

    Args:
        model: a causal language model, with or without an adapter.
    """

    main = "logprobs"  # the output that is always there

    def __init__(self, model: Any) -> None:
        self._model = model
        self._config = model.config.get_text_config()
        self._splits: bool | None = None
        self._shares: bool | None = None

    @property
    def shares(self) -> bool:
        """Whether a prefix may be shared: the architecture does as a mask and positions say, seen on a short probe."""
        if self._shares is None:
            self._shares = plain_attention(self._config) and self._packs_alike()
        return self._shares

    def outputs(
        self,
        inputs: Mapping[str, torch.Tensor],
        index: torch.Tensor,
        wanted: Mapping[str, torch.Tensor | None],
        temperatures: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Runs the model on ``inputs`` and reads it at the flat positions ``index`` [n] of its [B, T] tokens.

        Args:
            inputs: "input_ids" [B, T], and where needed "attention_mask" [B, 1, T, T] and "position_ids" [B, T].
            index: int64 [n].
            wanted: "logprobs" -> ids [n], "target_logprobs" -> ids [n, K] with -1 for none, "entropy" -> None.
            temperatures: float32 [n], or None where all are 1.

        Returns:
            name -> [n] or [n, K], float32.
        """
        if self._splits is None:
            self._splits = self._finishes_alike(inputs["input_ids"])
        small = index.numel() * self._config.vocab_size <= KEPT
        if small or not self._splits:
            with selected_logits(self._model, index):
                logits = self._model(**inputs, use_cache=False).logits[0]
            return dict(zip(wanted, _read(logits, list(wanted), list(wanted.values()), temperatures), strict=True))
        with selected_hidden(self._model, index) as found:
            self._model(**inputs, use_cache=False)
        parts: list[tuple[torch.Tensor, ...]] = []
        for start in range(0, index.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            ids = [None if x is None else x[part] for x in wanted.values()]
            warm = None if temperatures is None else temperatures[part]
            parts.append(self._chunk(found[0][part], list(wanted), ids, warm))
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
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        scale = getattr(self._config, "logit_scale", None)
        divisor = getattr(self._config, "logits_scaling", None)
        cap = getattr(self._config, "final_logit_softcapping", None)
        logits = logits * scale if scale else logits
        logits = logits / divisor if divisor else logits
        return torch.tanh(logits / cap) * cap if cap else logits

    @torch.no_grad()
    def _finishes_alike(self, tokens: torch.Tensor) -> bool:
        """Whether ``_logits`` is all that this architecture does after its last hidden state."""
        few = tokens[:1, :8]
        index = torch.arange(few.numel(), device=few.device)
        with selected_logits(self._model, index):
            expected = self._model(input_ids=few, use_cache=False).logits[0]
        with selected_hidden(self._model, index) as found:
            self._model(input_ids=few, use_cache=False)
        return bool(
            torch.allclose(self._logits(found[0]), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        )

    @torch.no_grad()
    def _packs_alike(self) -> bool:
        """Whether two datums behind one prefix give the logits that each gives alone."""
        device = self._model.get_output_embeddings().weight.device
        data = [Datum([1, 2, 3, *rest], [0, 0, 0, 1, 1, 1]) for rest in ([4, 5, 6], [7, 8, 9])]
        found = []
        for share in (True, False):
            (batch,) = pack(data, 64, share=share)
            inputs = {"input_ids": torch.from_numpy(batch.tokens).to(device)}
            if batch.visible is not None and batch.positions is not None:
                inputs["attention_mask"] = torch.from_numpy(batch.visible).to(device)[:, None]
                inputs["position_ids"] = torch.from_numpy(batch.positions).to(device)
            try:
                with selected_logits(self._model, torch.from_numpy(batch.index).to(device)):
                    found.append(self._model(**inputs, use_cache=False).logits[0].float())
            except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError):
                return False
        close = 1e-4 if next(self._model.parameters()).dtype == torch.float32 else 0.1
        return bool((found[0] - found[1]).abs().max() < close * found[1].abs().max())


def plain_attention(config: Any) -> bool:
    """Whether every layer sees all earlier tokens, as far as the config tells."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return all(kind == "full_attention" for kind in kinds) if kinds else window is None


@contextmanager
def selected_logits(model: Any, index: torch.Tensor) -> Iterator[None]:
    """While open, the model computes logits only at the flat positions ``index`` [n] of its [B, T] input.

    The output embedding sees [1, n, H] instead of [B, T, H]; whatever the architecture does to logits afterwards is
    kept.
    """

    def select(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (_at(args[0], index)[None], *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def selected_hidden(model: Any, index: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """While open, a forward appends the hidden states [n, H] at ``index`` to the list and computes one logit row."""
    found: list[torch.Tensor] = []

    def take(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        found.append(_at(args[0], index))
        return (found[-1][:1][None].detach(), *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(take)
    try:
        yield found
    finally:
        handle.remove()


def _at(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, hidden.shape[-1])[index]


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
    for which in ids:
        if which is None:
            out.append(-(logprobs.exp() * logprobs).sum(-1))
        elif which.ndim == 1:
            out.append(logprobs.gather(1, which[:, None])[:, 0])
        else:
            out.append(logprobs.gather(1, which.clamp(min=0)).masked_fill(which < 0, 0.0))
    return tuple(out)
