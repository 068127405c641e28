"""The data that flows between the parts: frozen, validated, numpy inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit._calls import answered, hinted
from rlkit._drawn import Drawn
from rlkit._forms import Number, Numbers, TokenIds
from rlkit._parameters import Adam, Lora, SamplingParams
from rlkit._ratios import HIGHEST
from rlkit.errors import DataError

__all__ = ["Adam", "Datum", "ForwardBackwardOutput", "Lora", "Sample", "SamplingParams"]


Input: TypeAlias = Number | Numbers | Sequence[Sequence[Number]]

# What a caller may give, for type checkers; it is checked, and becomes an array, once all fields are there.


def _tokens(value: TokenIds) -> np.ndarray:
    return value  # type: ignore[return-value]


def _maybe_tokens(value: TokenIds | None) -> np.ndarray | None:
    return value  # type: ignore[return-value]


def _numbers(value: Numbers) -> np.ndarray:
    return value  # type: ignore[return-value]


def _inputs(value: Mapping[str, Input]) -> Mapping[str, np.ndarray]:
    return value  # type: ignore[return-value]


_REAL_INPUTS = ("advantages", "weights", "values", "returns", "rewards", "entropy")


@answered
@attrs.frozen(eq=False, repr=False)
class Datum:
    """A sequence of tokens, which of them the policy chose, and what a loss wants to know about those.

    Args:
        tokens: int64 [T], T >= 2.
        mask: bool [T]; True where the policy chose the token. ``mask[0]`` is False, since nothing comes before it,
            so n = mask.sum() < T.
        inputs: name -> float32 or int64 array of shape (), [T] or [T, K]; entry i describes token i (rule R1). An
            array of length n is scattered to the masked-in positions. Masked-out entries become 0, whatever they
            were. Integers stay integers, except for advantages, weights, values, returns, rewards, entropy and
            names that end in ``logprobs``.
        temperature: what the tokens were sampled at, in [0.001, 1000]; 0 means greedy.
        truncated: sampled with top_p, top_k, min_p or a penalty, so that ``sampling_logprobs`` are not the policy's;
            losses that use them refuse such a datum.

    Raises:
        DataError: naming the field and the index.

    >>> datum = Datum(tokens=[5, 6, 7, 8], mask=[0, 0, 1, 1], inputs={"advantages": [0.5, -0.5]})
    >>> datum.inputs["advantages"]
    array([ 0. ,  0. ,  0.5, -0.5], dtype=float32)
    >>> datum.select(datum.tokens)
    array([7, 8])
    """

    tokens: np.ndarray = attrs.field(converter=_tokens)
    mask: np.ndarray = attrs.field(converter=_numbers)
    inputs: Mapping[str, np.ndarray] = attrs.field(factory=dict, converter=_inputs)
    temperature: float = 1.0
    truncated: bool = False

    def __attrs_post_init__(self) -> None:
        tokens = _check.token_ids("Datum.tokens", self.tokens, low_length=2)
        mask = _mask("Datum.mask", self.mask, tokens.size)
        if not isinstance(self.inputs, Mapping):
            raise DataError(_check.problem("Datum.inputs", f"got {_check.shown(self.inputs)}", "a mapping of arrays"))
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "mask", mask)
        inputs = {name: _aligned(name, value, mask) for name, value in self.inputs.items()}
        object.__setattr__(self, "inputs", MappingProxyType(inputs))
        temperature = _check.temperature("Datum.temperature", self.temperature, zero=True, error=DataError)
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "truncated", _check.flag("Datum.truncated", self.truncated, error=DataError))

    @classmethod
    def supervised(cls, prompt: TokenIds, completion: TokenIds, weights: Number | Numbers = 1.0) -> Datum:
        """Return a datum for cross entropy: ``completion`` int [n >= 1] is to be learnt after ``prompt`` int [P >= 1].

        ``weights`` is a number, or one number per completion token.
        """
        prompt = _check.token_ids("prompt", prompt, low_length=1)
        completion = _check.token_ids("completion", completion, low_length=1)
        mask = np.arange(prompt.size + completion.size) >= prompt.size
        return cls(np.concatenate([prompt, completion]), mask, {"weights": weights})

    def with_inputs(self, **inputs: Input) -> Datum:
        """Return a copy with these inputs added or replaced."""
        return attrs.evolve(self, inputs={**self.inputs, **inputs})

    def select(self, x: Input) -> np.ndarray:
        """Select [T] or [T, K] -> [n] or [n, K]: the entries of the policy's own tokens."""
        array = _check.as_array("select(x)", x, f"length {self.mask.size}")
        if array.ndim == 0 or array.shape[0] != self.mask.size:
            raise DataError(
                _check.problem("select(x)", _check.shown(array), f"length {self.mask.size}", "one per token")
            )
        selected: np.ndarray = array[self.mask]
        return selected

    def expand(self, x: Input) -> np.ndarray:
        """Expand [n] or [n, K] -> [T] or [T, K]: the inverse of ``select``, 0 elsewhere."""
        n = int(self.mask.sum())
        array = _check.as_array("expand(x)", x, f"length {n}")
        if array.ndim == 0 or array.shape[0] != n:
            raise DataError(_check.problem("expand(x)", _check.shown(array), f"length {n}", "one per masked-in token"))
        out = np.zeros((self.mask.size, *array.shape[1:]), array.dtype)
        out[self.mask] = array
        return out

    def __len__(self) -> int:
        return int(self.tokens.size)

    def __repr__(self) -> str:
        return f"Datum(T={self.tokens.size}, n={int(self.mask.sum())}, inputs={sorted(self.inputs)})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.tokens, self.mask, dict(self.inputs), self.temperature, self.truncated)


@hinted("sample")
@answered
@attrs.frozen(eq=False, repr=False, getstate_setstate=False)
class Sample(Drawn):
    """What a sampler returns for one completion.

    Args:
        prompt: int64 [P >= 1], as it was sent.
        tokens: int64 [n], the stop token included.
        logprobs: float32 [n], of the distribution that each token was drawn from (penalties, temperature, top_k, top_p
            and min_p applied); for greedy samples (temperature 0) the untempered ones, penalties applied.
        stop_reason: "stop" or "length".
        temperature, top_p, top_k: how it was drawn.
        version: optimizer steps that the policy had taken at the sampler's snapshot; the fewest, where several policies
            drew the tokens.
        versions: int64 [n], the same for each token, where several policies drew them one after the other, as when
            weights are updated in flight; None: ``version`` drew all.
        min_p, repetition_penalty, presence_penalty, frequency_penalty: how it was drawn. See ``SamplingParams``, whose
            ``truncates``, ``penalizes``, ``reshapes`` and ``drawn_with`` a sample has, too.
    """

    prompt: np.ndarray = attrs.field(converter=_tokens)
    tokens: np.ndarray = attrs.field(converter=_tokens)
    logprobs: np.ndarray = attrs.field(converter=_numbers)
    stop_reason: Literal["stop", "length"] = "stop"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    version: int = 0
    min_p: float = attrs.field(default=0.0, kw_only=True)
    repetition_penalty: float = attrs.field(default=1.0, kw_only=True)
    presence_penalty: float = attrs.field(default=0.0, kw_only=True)
    frequency_penalty: float = attrs.field(default=0.0, kw_only=True)
    versions: np.ndarray | None = attrs.field(default=None, kw_only=True, converter=_maybe_tokens)

    def __attrs_post_init__(self) -> None:
        prompt = _check.token_ids("Sample.prompt", self.prompt, low_length=1)
        tokens = _check.token_ids("Sample.tokens", self.tokens)
        logprobs = _check.as_array("Sample.logprobs", self.logprobs, "float32 [n]").astype(np.float32)
        if logprobs.shape != tokens.shape:
            what = f"has shape {logprobs.shape}"
            raise DataError(_check.problem("Sample.logprobs", what, f"{tokens.shape}", "one per sampled token"))
        bad = np.flatnonzero(~np.isfinite(logprobs))
        if bad.size:
            raise DataError(_check.problem(f"Sample.logprobs[{bad[0]}]", f"is {logprobs[bad[0]]}", "a finite number"))
        object.__setattr__(self, "prompt", prompt)
        object.__setattr__(self, "tokens", tokens)
        _check_logprobs("Sample.logprobs", logprobs)
        object.__setattr__(self, "logprobs", _check.frozen(logprobs))
        _check.choice("Sample.stop_reason", self.stop_reason, ("stop", "length"), error=DataError)
        self._check_drawn("Sample.", DataError)
        _check.integer("Sample.version", self.version, low=0, error=DataError)
        if self.versions is not None:
            version, versions = _versions(self.versions, tokens.size, self.version)
            object.__setattr__(self, "version", version)
            object.__setattr__(self, "versions", versions)

    @property
    def token_versions(self) -> np.ndarray:
        """int64 [n]: the version that drew each token.

        >>> Sample([5], [6, 7], [-1.0, -1.0], versions=[3, 4]).token_versions, Sample([5], [6], [-1.0]).token_versions
        (array([3, 4]), array([0]))
        """
        return np.full(self.tokens.size, self.version) if self.versions is None else self.versions

    def datum(self, advantage: Number | Numbers | None = None, **inputs: Input) -> Datum:
        """Return the datum that trains this sample: ``sampling_logprobs`` and, when given, ``advantages``.

        Where several policies drew its tokens, there is the input ``versions``, too.

        Args:
            advantage: one number for the sample, or one per sampled token.
            inputs: further inputs (``weights=``, ``reference_logprobs=``, ...): (), [n], [T], [n, K] or [T, K]. An
                explicit ``sampling_logprobs=`` takes the place of the recorded ones and says that truncation and
                penalties have been corrected for.
        """
        n = self.tokens.size
        if advantage is not None:
            if "advantages" in inputs:
                raise DataError("Sample.datum: got both advantage and advantages=; give one of them")
            array = _check.as_array("advantage", advantage, "a number, or one per token")
            inputs["advantages"] = np.full(n, array) if array.ndim == 0 else array
        taken = {"tokens", "mask", "inputs", "prompt", "temperature", "truncated"} & inputs.keys()
        if taken:
            raise DataError(f"Sample.datum: {min(taken)!r} is the sample's own; change it with attrs.evolve")
        truncated = self.reshapes and "sampling_logprobs" not in inputs
        inputs.setdefault("sampling_logprobs", self.logprobs)
        if self.versions is not None:
            inputs.setdefault("versions", self.versions)
        tokens = np.concatenate([self.prompt, self.tokens])
        mask = np.arange(tokens.size) >= self.prompt.size
        return Datum(tokens, mask, inputs, temperature=self.temperature, truncated=truncated)

    def __repr__(self) -> str:
        return f"Sample(P={self.prompt.size}, n={self.tokens.size}, stop_reason={self.stop_reason!r})"


@hinted("output")
@attrs.frozen(eq=False, repr=False)
class ForwardBackwardOutput:
    """What ``forward`` and ``forward_backward`` found, before any update.

    Attributes:
        logprobs: one float32 [T] per datum, the policy's, 0 wherever its mask is False.
        outputs: name -> one array per datum, for what ``want`` asked for, such as "entropy".
        metrics: keys end in ":sum" or ":mean" (mean over datums); "loss:sum", "tokens:sum" (masked-in tokens) and
            "datums:sum" are always there.
        masks: the datums' masks.
    """

    logprobs: Sequence[np.ndarray]
    outputs: Mapping[str, Sequence[np.ndarray]]
    metrics: Mapping[str, float]
    masks: Sequence[np.ndarray]

    @property
    def selected(self) -> list[np.ndarray]:
        """One float32 [n] per datum: the logprobs of the policy's own tokens."""
        return [lp[mask] for lp, mask in zip(self.logprobs, self.masks, strict=True)]

    def __repr__(self) -> str:
        return f"ForwardBackwardOutput({len(self.masks)} datums, metrics={dict(self.metrics)})"


def _mask(where: str, value: object, length: int) -> np.ndarray:
    array = _check.as_array(where, value, f"bool [{length}]")
    if array.shape != (length,):
        raise DataError(_check.problem(where, f"has shape {array.shape}", f"({length},)", "one entry per token"))
    bad = np.flatnonzero((array != 0) & (array != 1))
    if bad.size:
        raise DataError(_check.problem(f"{where}[{bad[0]}]", f"is {array[bad[0]]}", "True or False"))
    if array[0]:
        raise DataError(_check.problem(f"{where}[0]", "is True", "False", "the first token has nothing before it"))
    return _check.frozen(array.astype(bool))


def _versions(value: object, n: int, version: int) -> tuple[int, np.ndarray | None]:
    """Return (the oldest version, one per token; None where all are the same)."""
    where = "Sample.versions"
    array = _check.as_array(where, value, f"int [{n}]")
    if array.shape != (n,) or (n and array.dtype.kind not in "iu"):
        raise DataError(where, f"has shape {array.shape} and type {array.dtype}", f"int [{n}]", "one per sampled token")
    if n == 0:
        return version, None
    oldest = _check.integer(f"min({where})", int(array.min()), low=0, error=DataError)
    if version not in (0, oldest):
        raise DataError("Sample.version", f"is {version}", f"{oldest}", "the oldest of versions; it may be left out")
    return oldest, None if (array == oldest).all() else _check.frozen(array.astype(np.int64))


def _check_logprobs(where: str, array: np.ndarray) -> None:
    """Raise DataError where an entry can be no logprob of a sampled token."""
    high = np.argwhere(array > HIGHEST)
    if high.size or (array.ndim == 0 and array > HIGHEST):
        index = "".join(f"[{i}]" for i in high[0]) if high.size else ""
        what = f"is {array[tuple(high[0])] if high.size else array}"
        why = f"a logprob is at most 0, but for rounding up to {HIGHEST}; is it a probability, or its sign reversed?"
        raise DataError(_check.problem(where + index, what, "a logprob", why))


def _aligned(name: str, value: object, mask: np.ndarray) -> np.ndarray:
    """Return ``value`` as (), [T] or [T, K], float32 or int64, 0 where masked out, finite elsewhere."""
    where = f"Datum.inputs[{name!r}]"
    if not isinstance(name, str) or not name.isidentifier():
        raise DataError(_check.problem("Datum.inputs", f"has the key {name!r}", "names that a loss can have"))
    length, n = mask.size, int(mask.sum())
    array = _check.as_array(where, value, f"shape (), ({n},) or ({length},)")
    if array.dtype.kind == "b":
        raise DataError(_check.problem(where, "holds booleans", "numbers", "write 0.0 and 1.0"))
    if (
        array.ndim > 2
        or (array.ndim == 2 and array.shape[1] == 0)
        or (array.ndim and array.shape[0] not in (n, length))
    ):
        expected = f"(), ({n},), ({length},), ({n}, K) or ({length}, K)"
        raise DataError(_check.problem(where, f"has shape {array.shape}", expected, "one entry per token"))
    real = array.dtype.kind == "f" or name in _REAL_INPUTS or name.endswith("logprobs")
    if array.ndim and array.shape[0] == n:
        scattered = np.zeros((length, *array.shape[1:]), array.dtype)
        scattered[mask] = array
        array = scattered
    elif array.ndim:
        array = np.where(mask.reshape(-1, *[1] * (array.ndim - 1)), array, 0)
    if not real:
        return _check.frozen(array.astype(np.int64))
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    bad = np.argwhere(~np.isfinite(array))
    if bad.size or (array.ndim == 0 and not np.isfinite(array)):
        index = "".join(f"[{i}]" for i in bad[0])
        raise DataError(_check.problem(where + index, f"is {array[tuple(bad[0])]}", "a finite float32"))
    if name == "sampling_logprobs":
        _check_logprobs(where, array)
    return _check.frozen(array)
