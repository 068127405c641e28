"""What calls are made with: how to sample, how to step, which adapter. Frozen, validated."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from rlkit import _check
from rlkit._calls import answered
from rlkit._drawn import Drawn
from rlkit.errors import ConfigError

__all__ = ["Adam", "Lora", "SamplingParams"]

Stops: TypeAlias = tuple[str, ...] | tuple[int, ...] | None


def _stop(stop: tuple[str, ...] | tuple[int, ...] | list[str] | list[int] | None) -> Stops:
    where, expected = "SamplingParams.stop", "None, or a tuple of non-empty strings, or a tuple of token ids >= 0"
    if stop is None:
        return None
    if isinstance(stop, (str, bytes)) or not isinstance(stop, (tuple, list)):
        raise ConfigError(where, f"got {_check.shown(stop)}", expected, "write a tuple: (text,)")
    texts = tuple(x for x in stop if isinstance(x, str) and x)
    if len(texts) == len(stop):
        return texts
    for i, x in enumerate(stop):
        if isinstance(x, str):
            raise ConfigError(f"{where}[{i}]", f"is {x!r}", expected)
        _check.integer(f"{where}[{i}]", x, low=0, why="strings and ids are not mixed")
    return tuple(int(x) for x in stop)


def _modules(names: tuple[str, ...] | list[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(n, str) and n for n in names):
        raise ConfigError("Lora.target_modules", _check.shown(names), "a tuple of module names")
    return tuple(names)


@answered
@attrs.frozen(getstate_setstate=False)
class SamplingParams(Drawn):
    r"""How to sample.

    The options act in the order of transformers: penalties, temperature, top_k, top_p, min_p. (vLLM has min_p before
    the other two, so that top_p is of what min_p left.) All but the temperature draw from another distribution than the
    policy's: its samples make ``Datum.truncated`` datums, which losses with a ratio refuse.

    Args:
        max_tokens: in [1, 2^31); the completion also ends where the model's context does.
        temperature: in [0.001, 1000]; 0 is greedy, its logprobs untempered.
        top_p: in (0, 1]; 1 is off.
        top_k: >= 1, or -1 for off.
        stop: None: the model's end tokens. A non-empty tuple of strings or of token ids: these in addition.
            ``()``: nothing stops a completion but ``max_tokens``.
        min_p: in [0, 1]; tokens less probable than this share of the most probable one are cut (arXiv 2407.01082); 0 is
            off.
        repetition_penalty: in [0.001, 1000]; logits of tokens of the prompt and of the completion are divided by it
            where they are positive, multiplied where negative (CTRL, arXiv 1909.05858); 1 is off.
        presence_penalty: in [-2, 2]; taken off the logits of tokens that the completion has; 0 is off.
        frequency_penalty: in [-2, 2]; taken off them once for each time that the completion has the token; 0 is off.

    ``truncates``, ``penalizes`` and ``reshapes`` (either of them, and not greedy) say what a set of options does, and
    ``drawn_with`` gives those that a ``Sample`` records, as a dict: ``Sample(..., **params.drawn_with)``.

    >>> SamplingParams(max_tokens=8, stop=["\n"]).stop
    ('\n',)
    >>> SamplingParams(temperature=-1)
    Traceback (most recent call last):
    rlkit.errors.ConfigError: SamplingParams.temperature: got -1; expected a finite number >= 0.0
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: Stops = attrs.field(default=None, converter=_stop)
    min_p: float = attrs.field(default=0.0, kw_only=True)
    repetition_penalty: float = attrs.field(default=1.0, kw_only=True)
    presence_penalty: float = attrs.field(default=0.0, kw_only=True)
    frequency_penalty: float = attrs.field(default=0.0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        _check.integer("SamplingParams.max_tokens", self.max_tokens, low=1, high=2**31 - 1)
        self._check_drawn("SamplingParams.", ConfigError)


@answered
@attrs.frozen
class Adam:
    """One step of AdamW (decoupled weight decay, arXiv:1711.05101); every number may change from step to step.

    Args:
        learning_rate: >= 0.
        beta1, beta2: in [0, 1).
        eps: > 0.
        weight_decay: >= 0.
        grad_clip_norm: >= 0, the global norm above which the gradient is scaled down; 0 is off.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __attrs_post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
            _check.real(f"Adam.{name}", getattr(self, name), low=0.0)
        for name in ("beta1", "beta2"):
            _check.real(f"Adam.{name}", getattr(self, name), low=0.0, below=1.0)
        _check.real("Adam.eps", self.eps, above=0.0)


@answered
@attrs.frozen
class Lora:
    """A low-rank adapter (arXiv:2106.09685): W + (alpha / rank) B A, B = 0 at first, no dropout.

    Args:
        rank: >= 1.
        alpha: > 0.
        seed: of the initial A; None takes the backend's.
        train_mlp, train_attn, train_unembed: which linear layers get one.
        target_modules: names of modules instead of the three flags, as in peft.
    """

    rank: int = 32
    alpha: float = 32.0
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    target_modules: tuple[str, ...] | None = attrs.field(default=None, converter=_modules)

    def __attrs_post_init__(self) -> None:
        _check.integer("Lora.rank", self.rank, low=1)
        _check.real("Lora.alpha", self.alpha, above=0.0)
        _check.optional(_check.integer, "Lora.seed", self.seed, low=0)
        flags = [_check.flag(f"Lora.{n}", getattr(self, n)) for n in ("train_mlp", "train_attn", "train_unembed")]
        if self.target_modules is None and not any(flags):
            raise ConfigError("Lora: train_mlp, train_attn and train_unembed are all False; nothing would train")


for _public in (Adam, Lora, SamplingParams):
    _public.__module__ = "rlkit.types"  # where users import them from
