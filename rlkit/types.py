"""The data that flows between the parts: frozen, validated, numpy inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias, TypedDict, cast

import attrs
import numpy as np

from rlkit import _check
from rlkit._rows import HIGHEST, Number, Numbers, TokenIds
from rlkit.errors import ConfigError, DataError, RlkitError

__all__ = [
    "DRAWN_WITH",
    "NEW_OPTIONS",
    "Adam",
    "Datum",
    "Drawn",
    "DrawnWith",
    "ForwardBackwardOutput",
    "Lora",
    "Sample",
    "SamplingParams",
]

NEW_OPTIONS: Mapping[str, float] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Options that not every sampler has, and their neutral values."""

DRAWN_WITH = ("temperature", "top_p", "top_k", *NEW_OPTIONS)


class DrawnWith(TypedDict, total=False):
    """The options that change how tokens are drawn."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


class Drawn:
    """A mixin of the two classes with these fields."""

    __slots__ = ()

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float

    @property
    def drawn_with(self) -> DrawnWith:
        """The fields that say how tokens are drawn, by name: a sampler passes them on to its samples."""
        return cast("DrawnWith", {name: getattr(self, name) for name in DRAWN_WITH})

    @property
    def truncates(self) -> bool:
        """Whether top_p, top_k or min_p cuts the distribution."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def penalizes(self) -> bool:
        """Whether a penalty makes earlier tokens less, or more, probable than the policy does."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reshapes(self) -> bool:
        """Whether tokens are drawn from another distribution than the policy's at that temperature."""
        return self.temperature > 0 and (self.truncates or self.penalizes)

    def _convert_drawn(self, error: type[RlkitError]) -> None:
        _check.convert(self, "temperature", _check.temperature, zero=True, error=error)
        _check.convert(self, "top_p", _check.real, above=0.0, high=1.0, error=error)
        _check.convert(self, "top_k", _top_k, error=error)
        _check.convert(self, "min_p", _check.real, low=0.0, high=1.0, error=error)
        _check.convert(self, "repetition_penalty", _check.real, low=0.001, high=1000.0, error=error)
        _check.convert(self, "presence_penalty frequency_penalty", _check.real, low=-2.0, high=2.0, error=error)


def _top_k(where: str, value: object, error: type[RlkitError]) -> int:
    value = _check.plain(value)
    if type(value) is int and value == -1:
        return value
    return _check.integer(where, value, low=1, why="or -1 for off", error=error)


ALL_LINEAR = "all-linear"  # peft's name for all linear layers but the output head

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
    return tuple(
        _check.integer(f"{where}[{i}]", x, low=0, why="do not mix strings and ids") for i, x in enumerate(stop)
    )


def _modules(names: tuple[str, ...] | list[str] | Literal["all-linear"] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if names == ALL_LINEAR:
        return (ALL_LINEAR,)
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(n, str) and n for n in names):
        raise ConfigError("Lora.target_modules", _check.shown(names), "a tuple of module names, or 'all-linear'")
    return tuple(names)


@attrs.frozen
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
        _check.convert(self, "max_tokens", _check.integer, low=1, high=2**31 - 1)
        self._convert_drawn(ConfigError)


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
        _check.convert(self, "learning_rate weight_decay grad_clip_norm", _check.real, low=0.0)
        _check.convert(self, "beta1 beta2", _check.real, low=0.0, below=1.0)
        _check.convert(self, "eps", _check.real, above=0.0)


@attrs.frozen
class Lora:
    """A low-rank adapter (arXiv:2106.09685): W + (alpha / rank) B A, B = 0 at first, no dropout.

    Args:
        rank: >= 1.
        alpha: > 0.
        seed: of the initial A; None takes the backend's.
        train_mlp, train_attn: whether the linear layers of MLPs and of attention get one.
        train_unembed: whether the output head gets one. None: on the local backend where the head is not tied to the
            embedding, since other libraries can neither merge nor serve the adapter of a tied head; elsewhere True.
        target_modules: names of modules instead of the three flags, as in peft. "all-linear" is attention and MLP, and
            not the output head.

    >>> Lora(target_modules="all-linear") == Lora(train_unembed=False)
    True
    """

    rank: int = 32
    alpha: float = 32.0
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool | None = None
    target_modules: tuple[str, ...] | None = attrs.field(default=None, converter=_modules)

    def __attrs_post_init__(self) -> None:
        _check.convert(self, "rank", _check.integer, low=1)
        _check.convert(self, "alpha", _check.real, above=0.0)
        _check.convert(self, "seed", _check.integer, none=True, low=0)
        _check.convert(self, "train_mlp train_attn", _check.flag)
        _check.convert(self, "train_unembed", _check.flag, none=True)
        if self.target_modules == (ALL_LINEAR,):
            object.__setattr__(self, "target_modules", None)
            object.__setattr__(self, "train_unembed", bool(self.train_unembed))
        trains = self.train_mlp or self.train_attn or self.train_unembed is not False
        if self.target_modules is None and not trains:
            raise ConfigError("Lora: train_mlp, train_attn and train_unembed are all False; nothing would train")


for _public in (Adam, Lora, SamplingParams):
    _public.__module__ = "rlkit.types"  # where users import them from

Input: TypeAlias = Number | Numbers | Sequence[Sequence[Number]]

# The types that callers may pass, for type checkers; values are checked and converted once all fields are set.


def _tokens(value: TokenIds) -> np.ndarray:
    return value  # type: ignore[return-value]


def _maybe_tokens(value: TokenIds | None) -> np.ndarray | None:
    return value  # type: ignore[return-value]


def _numbers(value: Numbers) -> np.ndarray:
    return value  # type: ignore[return-value]


def _inputs(value: Mapping[str, Input]) -> Mapping[str, np.ndarray]:
    return value  # type: ignore[return-value]


_REAL_INPUTS = ("advantages", "weights", "values", "returns", "rewards", "entropy")
# With a loss's [n] a column [n, 1] of these broadcasts to [n, n]: each token would get the sum of all.
_ONE_PER_TOKEN = (*_REAL_INPUTS, "old_values", "sampling_logprobs", "reference_logprobs", "old_logprobs", "versions")


@attrs.frozen(eq=False, repr=False)
class Datum:
    """A sequence of tokens, which of them the policy chose, and the inputs of a loss for those.

    Args:
        tokens: int64 [T], T >= 2.
        mask: bool [T]; True where the policy chose the token. ``mask[0]`` is False, since nothing comes before it,
            so n = mask.sum() < T.
        inputs: name -> float32 or int64 array of shape (), [T] or [T, K]; entry i describes token i (rule R1). An
            array of length n is scattered to the masked-in positions. Masked-out entries become
            0. Integers stay integers, except for advantages, weights, values, returns, rewards, entropy and
            names that end in ``logprobs``, which are at most 0, but for rounding up to 0.1. ``target_tokens`` and
            ``versions`` are integers. [T, K] is for ``target_tokens`` and what goes with them, such as
            ``teacher_logprobs``; advantages, weights, values, returns and the policies' logprobs are one number per
            token.
        temperature: the sampling temperature, in [0.001, 1000]; 0 means greedy.
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
        _check.convert(self, "temperature", _check.temperature, zero=True, error=DataError)
        _check.convert(self, "truncated", _check.flag, error=DataError)

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


@attrs.frozen(eq=False, repr=False)
class Sample(Drawn):
    """A sampler's result for one completion.

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
        self._convert_drawn(DataError)
        _check.convert(self, "version", _check.integer, low=0, error=DataError)
        if self.versions is not None:
            version, versions = _versions(self.versions, tokens.size, self.version)
            object.__setattr__(self, "version", version)
            object.__setattr__(self, "versions", versions)

    @property
    def token_versions(self) -> np.ndarray:
        """The int64 [n] of the version that drew each token.

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
            raise DataError(f"Sample.datum: {min(taken)!r} comes from the sample; change it with attrs.evolve")
        truncated = self.reshapes and "sampling_logprobs" not in inputs
        inputs.setdefault("sampling_logprobs", self.logprobs)
        if self.versions is not None:
            inputs.setdefault("versions", self.versions)
        tokens = np.concatenate([self.prompt, self.tokens])
        mask = np.arange(tokens.size) >= self.prompt.size
        return Datum(tokens, mask, inputs, temperature=self.temperature, truncated=truncated)

    def __repr__(self) -> str:
        return f"Sample(P={self.prompt.size}, n={self.tokens.size}, stop_reason={self.stop_reason!r})"


@attrs.frozen(eq=False, repr=False)
class ForwardBackwardOutput:
    """The output of ``forward`` and ``forward_backward``, before any update.

    Attributes:
        logprobs: one float32 [T] per datum, the policy's, 0 wherever its mask is False.
        outputs: name -> one array per datum, for the names in ``want``, such as "entropy".
        metrics: keys end in ":sum", ":mean" (mean over datums), ":max" or ":min"; "loss:sum", "tokens:sum" (masked-in
            tokens) and "datums:sum" are always present.
        masks: the datums' masks.
    """

    logprobs: Sequence[np.ndarray]
    outputs: Mapping[str, Sequence[np.ndarray]]
    metrics: Mapping[str, float]
    masks: Sequence[np.ndarray]

    @property
    def selected(self) -> list[np.ndarray]:
        """The float32 [n] of each datum: the logprobs of the policy's own tokens."""
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
        raise DataError(_check.problem(f"{where}[0]", "is True", "False", "no token precedes the first one"))
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
        raise DataError("Sample.version", f"is {version}", f"{oldest}", "the oldest of versions, or omit it")
    return oldest, None if (array == oldest).all() else _check.frozen(array.astype(np.int64))


def _check_logprobs(where: str, array: np.ndarray) -> None:
    """Raise DataError where an entry cannot be the logprob of a sampled token."""
    high = np.argwhere(array > HIGHEST)
    if high.size or (array.ndim == 0 and array > HIGHEST):
        index = "".join(f"[{i}]" for i in high[0]) if high.size else ""
        what = f"is {array[tuple(high[0])] if high.size else array}"
        why = f"a logprob is at most 0, plus rounding up to {HIGHEST}; is it a probability, or is its sign reversed?"
        raise DataError(_check.problem(where + index, what, "a logprob", why))


def _check_input_shape(where: str, name: str, shape: tuple[int, ...], n: int, length: int) -> None:
    if len(shape) > 2 or 0 in shape[1:] or (shape and shape[0] not in (n, length)):
        expected = f"(), ({n},), ({length},), ({n}, K) or ({length}, K)"
        raise DataError(_check.problem(where, f"has shape {shape}", expected, "one entry per token"))
    if len(shape) == 2 and name in _ONE_PER_TOKEN:
        raise DataError(where, f"has shape {shape}", f"(), ({n},) or ({length},)", _check.squeeze(shape))


def _check_integers(where: str, name: str, array: np.ndarray) -> None:
    if name in ("target_tokens", "versions") and array.size and array.dtype.kind not in "iu":
        raise DataError(where, f"has dtype {array.dtype}", "integers", f"write {name}.astype(int)")


def _aligned(name: str, value: object, mask: np.ndarray) -> np.ndarray:
    """Return ``value`` as (), [T] or [T, K], float32 or int64, 0 where masked out, finite elsewhere."""
    where = f"Datum.inputs[{name!r}]"
    if not isinstance(name, str) or not name.isidentifier():
        raise DataError(_check.problem("Datum.inputs", f"has the key {name!r}", "an identifier that a loss can name"))
    length, n = mask.size, int(mask.sum())
    array = _check.as_array(where, value, f"shape (), ({n},) or ({length},)")
    if array.dtype.kind == "b":
        raise DataError(_check.problem(where, "holds booleans", "numbers", "write 0.0 and 1.0"))
    _check_input_shape(where, name, array.shape, n, length)
    _check_integers(where, name, array)
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
    if name.endswith("logprobs"):
        _check_logprobs(where, array)
    return _check.frozen(array)
