"""The data that flows: how to sample, what was sampled, what to learn from it, what training gives back.

All classes are frozen. Each field is checked by its converter when an object is made; the error names class, field and
index. Code that receives a ``Datum`` or a ``Sample`` does not check its fields again. Arrays are read-only copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit._check import HIGHEST, Number, Numbers, TokenIds, checked
from rlkit.errors import ConfigError, DataError, RlkitError

__all__ = [
    "OPTIONAL_OPTIONS",
    "SAMPLING_OPTIONS",
    "Adam",
    "Datum",
    "ForwardBackwardOutput",
    "Lora",
    "Sample",
    "SamplingOptions",
    "SamplingParams",
]

Input: TypeAlias = Number | Numbers | Sequence[Sequence[Number]]
Stops: TypeAlias = tuple[str, ...] | tuple[int, ...] | None


def _check_top_k(where: str, value: object, *, error: type[RlkitError]) -> int:
    value = _check.plain(value)
    off = type(value) is int and value == -1
    return -1 if off else _check.integer(where, value, low=1, why="or -1 for off", error=error)


# name -> the value that changes nothing, the check of a value, its limits
_OPTIONS: Mapping[str, tuple[float, Callable[..., object], Mapping[str, Any]]] = {
    "temperature": (1.0, _check.temperature, {"zero": True}),
    "top_p": (1.0, _check.real, {"above": 0.0, "high": 1.0}),
    "top_k": (-1, _check_top_k, {}),
    "min_p": (0.0, _check.real, {"low": 0.0, "high": 1.0}),
    "repetition_penalty": (1.0, _check.real, {"low": 0.001, "high": 1000.0}),
    "presence_penalty": (0.0, _check.real, {"low": -2.0, "high": 2.0}),
    "frequency_penalty": (0.0, _check.real, {"low": -2.0, "high": 2.0}),
}
SAMPLING_OPTIONS = tuple(_OPTIONS)
"""The options that change the distribution which tokens are drawn from."""
OPTIONAL_OPTIONS: Mapping[str, float] = {name: _OPTIONS[name][0] for name in SAMPLING_OPTIONS[3:]}
"""The options that some samplers lack, each with the value that changes nothing."""


def _option(name: str, error: type[RlkitError]) -> Any:
    neutral, check, limits = _OPTIONS[name]
    return checked(neutral, check, kw_only=name in OPTIONAL_OPTIONS or None, error=error, **limits)


class SamplingOptions:
    """The options that ``SamplingParams`` asks for and ``Sample`` records."""

    __slots__ = ()

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float

    @property
    def sampling_options(self) -> dict[str, Any]:
        """The options by name, as a sampler passes them on: ``Sample(..., **params.sampling_options)``."""
        return {name: getattr(self, name) for name in SAMPLING_OPTIONS}

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


def _check_stop(stop: tuple[str, ...] | tuple[int, ...] | list[str] | list[int] | None) -> Stops:
    where, expected = "SamplingParams.stop", "None, or a tuple of non-empty strings, or a tuple of token ids >= 0"
    if stop is None:
        return None
    if not isinstance(stop, (tuple, list)):
        raise ConfigError(where, f"got {_check.describe(stop)}", expected, "write a tuple: (text,)")
    texts = tuple(x for x in stop if isinstance(x, str) and x)
    if len(texts) == len(stop):
        return texts
    for i, x in enumerate(stop):
        if isinstance(x, str):
            raise ConfigError(f"{where}[{i}]", f"is {x!r}", expected)
    return tuple(
        _check.integer(f"{where}[{i}]", x, low=0, why="do not mix strings and ids") for i, x in enumerate(stop)
    )


@attrs.frozen
class SamplingParams(SamplingOptions):
    r"""How to sample.

    The options act in the order of transformers: penalties, temperature, top_k, top_p, min_p. (vLLM has min_p before
    the other two, so that top_p is of what min_p left.) Every option but the temperature changes the distribution: a
    datum of such a sample is ``truncated``, and losses with a ratio refuse it. Tokens exactly as probable as the last
    one that top_k or top_p keeps are kept, too.

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

    ``truncates``, ``penalizes`` and ``reshapes`` (either of them, and not greedy) say what a set of options does.

    >>> SamplingParams(max_tokens=8, stop=["\n"]).stop
    ('\n',)
    >>> SamplingParams(temperature=-1)
    Traceback (most recent call last):
    rlkit.errors.ConfigError: SamplingParams.temperature: got -1; expected a finite number >= 0.0
    """

    max_tokens: int = checked(64, _check.integer, low=1, high=2**31 - 1)
    temperature: float = _option("temperature", ConfigError)
    top_p: float = _option("top_p", ConfigError)
    top_k: int = _option("top_k", ConfigError)
    stop: Stops = attrs.field(default=None, converter=_check_stop)
    min_p: float = _option("min_p", ConfigError)
    repetition_penalty: float = _option("repetition_penalty", ConfigError)
    presence_penalty: float = _option("presence_penalty", ConfigError)
    frequency_penalty: float = _option("frequency_penalty", ConfigError)


def _refuse(where: str, array: np.ndarray, bad: np.ndarray, expected: str, why: str = "") -> None:
    """Raise DataError for the first entry of ``array`` that is ``bad``."""
    if bad.any():
        index = tuple(np.argwhere(bad)[0])
        raise DataError(where + "".join(f"[{i}]" for i in index), f"is {array[index]}", expected, why)


def _refuse_probabilities(where: str, logprobs: np.ndarray) -> None:
    why = f"a logprob is at most 0, plus rounding up to {HIGHEST}; is it a probability, or is its sign reversed?"
    _refuse(where, logprobs, logprobs > HIGHEST, "a logprob", why)


def _check_prompt(value: TokenIds) -> np.ndarray:
    return _check.token_ids("Sample.prompt", value, low_length=1)


def _check_completion(value: TokenIds) -> np.ndarray:
    return _check.token_ids("Sample.tokens", value)


def _check_logprobs(value: Numbers) -> np.ndarray:
    array = _check.as_array("Sample.logprobs", value, "float32 [n]").astype(np.float32)
    _refuse("Sample.logprobs", array, ~np.isfinite(array), "a finite number")
    _refuse_probabilities("Sample.logprobs", array)
    return _check.frozen(array)


def _check_versions(value: TokenIds | None) -> np.ndarray | None:
    if value is None:
        return None
    array = _check.as_array("Sample.versions", value, "int [n]")
    if array.size and array.dtype.kind not in "iu":
        raise DataError("Sample.versions", f"has type {array.dtype}", "integers")
    _refuse("Sample.versions", array, array < 0, "an integer >= 0")
    return _check.frozen(array.astype(np.int64))


@attrs.frozen(eq=False, repr=False)
class Sample(SamplingOptions):
    """A sampler's result for one completion.

    Args:
        prompt: int64 [P >= 1], as it was sent.
        tokens: int64 [n], the stop token included.
        logprobs: float32 [n], of the distribution that each token was drawn from (penalties, temperature, top_k, top_p
            and min_p applied); for greedy samples (temperature 0) the untempered ones, penalties applied.
        stop_reason: "stop" or "length".
        temperature, top_p, top_k: how it was drawn.
        version: optimizer steps that the policy had taken at the sampler's snapshot; where several policies drew the
            tokens, the smallest of their versions.
        versions: int64 [n], the same for each token, where several policies drew them one after the other, as when
            weights are updated in flight; None: ``version`` drew all.
        min_p, repetition_penalty, presence_penalty, frequency_penalty: how it was drawn. See ``SamplingParams``, whose
            ``truncates``, ``penalizes``, ``reshapes`` and ``sampling_options`` a sample has, too.
    """

    prompt: np.ndarray = attrs.field(converter=_check_prompt)
    tokens: np.ndarray = attrs.field(converter=_check_completion)
    logprobs: np.ndarray = attrs.field(converter=_check_logprobs)
    stop_reason: Literal["stop", "length"] = checked("stop", _check.choice, options=("stop", "length"), error=DataError)
    temperature: float = _option("temperature", DataError)
    top_p: float = _option("top_p", DataError)
    top_k: int = _option("top_k", DataError)
    version: int = checked(0, _check.integer, low=0, error=DataError)
    min_p: float = _option("min_p", DataError)
    repetition_penalty: float = _option("repetition_penalty", DataError)
    presence_penalty: float = _option("presence_penalty", DataError)
    frequency_penalty: float = _option("frequency_penalty", DataError)
    versions: np.ndarray | None = attrs.field(default=None, kw_only=True, converter=_check_versions)

    def __attrs_post_init__(self) -> None:
        for name, array in (("logprobs", self.logprobs), ("versions", self.versions)):
            if array is not None and array.shape != self.tokens.shape:
                what = f"has shape {array.shape}"
                raise DataError(f"Sample.{name}", what, f"{self.tokens.shape}", "one per sampled token")
        if self.versions is None:
            return
        oldest = int(self.versions.min(initial=2**62)) if self.versions.size else self.version
        if self.version not in (0, oldest):  # 0, the default, means that it was not given
            what, why = f"is {self.version}", "the oldest of versions, or omit it"
            raise DataError("Sample.version", what, f"{oldest}", why)
        object.__setattr__(self, "version", oldest)
        if (self.versions == oldest).all():  # one policy drew all: the same as a sample without versions
            object.__setattr__(self, "versions", None)

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
        if advantage is not None:
            if "advantages" in inputs:
                raise DataError("Sample.datum: got both advantage and advantages=; give one of them")
            array = _check.as_array("advantage", advantage, "a number, or one per token")
            if array.shape not in ((), self.tokens.shape):
                raise DataError("advantage", f"has shape {array.shape}", f"() or {self.tokens.shape}", "one per token")
            inputs["advantages"] = np.full(self.tokens.size, array) if array.ndim == 0 else array
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


def _check_tokens(value: TokenIds) -> np.ndarray:
    return _check.token_ids("Datum.tokens", value, low_length=2)


def _check_mask(value: Numbers) -> np.ndarray:
    array = _check.as_array("Datum.mask", value, "bool [T]")
    _refuse("Datum.mask", array, (array != 0) & (array != 1), "True or False")
    return _check.frozen(array.astype(bool))


def _check_mapping(value: Mapping[str, Input]) -> Mapping[str, np.ndarray]:
    _check.require(isinstance(value, Mapping), "Datum.inputs", value, "a mapping of arrays", error=DataError)
    return value  # type: ignore[return-value]  # its arrays are aligned once the mask is known


@attrs.frozen(eq=False, repr=False)
class Datum:
    """A sequence of tokens, which of them the policy chose, and the inputs of a loss for those.

    Args:
        tokens: int64 [T], T >= 2.
        mask: bool [T]; True where the policy chose the token. ``mask[0]`` is False, since nothing comes before it,
            so n = mask.sum() < T.
        inputs: name -> float32 or int64 array of shape (), [T] or [T, K]; entry i describes token i (rule R1). An
            array of length n is scattered to the masked-in positions. Masked-out entries become 0. Integers stay
            integers, except for advantages, weights, values, old_values, returns, rewards, entropy and names that end
            in ``logprobs``. A logprob is at most 0; up to 0.1 is accepted, as rounding. ``target_tokens`` and
            ``versions`` are integers. [T, K] is for ``target_tokens`` and what goes with them, such as
            ``teacher_logprobs``; advantages, weights, values, returns and the policies' logprobs are one number per
            token.
        temperature: the sampling temperature, in [0.001, 1000]; 0 means greedy. A backend divides the logits by it, 0
            counting as 1, so that the logprobs are of the distribution that was sampled from.
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

    tokens: np.ndarray = attrs.field(converter=_check_tokens)
    mask: np.ndarray = attrs.field(converter=_check_mask)
    inputs: Mapping[str, np.ndarray] = attrs.field(factory=dict, converter=_check_mapping)
    temperature: float = _option("temperature", DataError)
    truncated: bool = checked(False, _check.flag, error=DataError)

    def __attrs_post_init__(self) -> None:
        mask, expected = self.mask, self.tokens.shape
        if mask.shape != expected:
            raise DataError("Datum.mask", f"has shape {mask.shape}", f"{expected}", "one entry per token")
        if mask[0]:
            raise DataError("Datum.mask[0]", "is True", "False", "no token precedes the first one")
        aligned = {name: _align_input(name, value, mask) for name, value in self.inputs.items()}
        object.__setattr__(self, "inputs", MappingProxyType(aligned))

    @classmethod
    def supervised(cls, prompt: TokenIds, completion: TokenIds, weights: Number | Numbers = 1.0) -> Datum:
        """Return a datum for cross entropy: ``completion`` int [n >= 1] is to be learnt after ``prompt`` int [P >= 1].

        ``weights`` is a number, or one number per completion token.
        """
        prompt = _check.token_ids("prompt", prompt, low_length=1)
        completion = _check.token_ids("completion", completion, low_length=1)
        tokens = np.concatenate([prompt, completion])
        return cls(tokens, np.arange(tokens.size) >= prompt.size, {"weights": weights})

    def with_inputs(self, **inputs: Input) -> Datum:
        """Return a copy with these inputs added or replaced."""
        return attrs.evolve(self, inputs={**self.inputs, **inputs})

    def select(self, x: Input) -> np.ndarray:
        """Select [T] or [T, K] -> [n] or [n, K]: the entries of the policy's own tokens."""
        selected: np.ndarray = _rows_of("select(x)", x, self.mask.size, "one per token")[self.mask]
        return selected

    def expand(self, x: Input) -> np.ndarray:
        """Expand [n] or [n, K] -> [T] or [T, K]: the inverse of ``select``, 0 elsewhere."""
        array = _rows_of("expand(x)", x, int(self.mask.sum()), "one per masked-in token")
        out = np.zeros((self.mask.size, *array.shape[1:]), array.dtype)
        out[self.mask] = array
        return out

    def __len__(self) -> int:
        return int(self.tokens.size)

    def __repr__(self) -> str:
        return f"Datum(T={self.tokens.size}, n={int(self.mask.sum())}, inputs={sorted(self.inputs)})"

    def __reduce__(self) -> tuple[object, ...]:  # a MappingProxyType cannot be pickled
        return type(self), (self.tokens, self.mask, dict(self.inputs), self.temperature, self.truncated)


def _rows_of(where: str, x: Input, length: int, why: str) -> np.ndarray:
    array = _check.as_array(where, x, f"length {length}")
    if array.ndim == 0 or array.shape[0] != length:
        raise DataError(where, f"got {_check.describe(array)}", f"length {length}", why)
    return array


_REAL_INPUTS = ("advantages", "weights", "values", "old_values", "returns", "rewards", "entropy")
_INTEGER_INPUTS = ("target_tokens", "versions")
_ONE_PER_TOKEN = (*_REAL_INPUTS, "sampling_logprobs", "reference_logprobs", "old_logprobs", "versions")


def _align_input(name: str, value: object, mask: np.ndarray) -> np.ndarray:
    """Return ``value`` as (), [T] or [T, K], float32 or int64, 0 where masked out, finite elsewhere."""
    where, length, n = f"Datum.inputs[{name!r}]", mask.size, int(mask.sum())
    if not isinstance(name, str) or not name.isidentifier():
        raise DataError("Datum.inputs", f"has the key {name!r}", "an identifier that a loss can name")
    if name in ("tokens", "mask", "inputs", "temperature", "truncated"):
        raise DataError("Datum.inputs", f"has the key {name!r}", "inputs", "it is a field; change it with attrs.evolve")
    array = _check.as_array(where, value, f"numbers of shape (), ({n},) or ({length},)")
    shape, kind = array.shape, array.dtype.kind
    if kind == "b":
        raise DataError(where, "holds booleans", "numbers", "write 0.0 and 1.0")
    flat = name in _ONE_PER_TOKEN  # [n, 1] times a loss's [n] would broadcast to [n, n]
    if len(shape) > 2 - flat or 0 in shape[1:] or (shape and shape[0] not in (n, length)):
        expected = f"(), ({n},) or ({length},)" if flat else f"(), ({n},), ({length},), ({n}, K) or ({length}, K)"
        raise DataError(where, f"has shape {shape}", expected, _check.squeeze(shape))
    if name in _INTEGER_INPUTS and array.size and kind not in "iu":
        raise DataError(where, f"has dtype {array.dtype}", "integers", f"write {name}.astype(int)")
    if shape:
        scattered = np.zeros((length, *shape[1:]), array.dtype)
        scattered[mask] = array if shape[0] == n else array[mask]
        array = scattered
    if kind in "iu" and name not in _REAL_INPUTS and not name.endswith("logprobs"):
        return _check.frozen(array.astype(np.int64))
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    _refuse(where, array, ~np.isfinite(array), "a finite float32")
    if name.endswith("logprobs"):
        _refuse_probabilities(where, array)
    return _check.frozen(array)


@attrs.frozen(eq=False, repr=False)
class ForwardBackwardOutput:
    """The output of ``forward`` and ``forward_backward``, before any update.

    Attributes:
        logprobs: one float32 [T] per datum, the policy's, 0 wherever its mask is False.
        outputs: name -> one array per datum, for the names in ``want``, such as "entropy".
        metrics: keys end in ":sum", ":mean" (over the datums with a masked-in token), ":max" or ":min"; "loss:sum",
            "tokens:sum" (masked-in tokens) and "datums:sum" (all datums) are always present.
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

    learning_rate: float = checked(1e-4, _check.real, low=0.0)
    beta1: float = checked(0.9, _check.real, low=0.0, below=1.0)
    beta2: float = checked(0.95, _check.real, low=0.0, below=1.0)
    eps: float = checked(1e-8, _check.real, above=0.0)
    weight_decay: float = checked(0.0, _check.real, low=0.0)
    grad_clip_norm: float = checked(0.0, _check.real, low=0.0)


ALL_LINEAR = "all-linear"  # peft's name for all linear layers but the output head


def _check_modules(names: tuple[str, ...] | list[str] | Literal["all-linear"] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if names == ALL_LINEAR:
        return (ALL_LINEAR,)
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(n, str) and n for n in names):
        expected = "a tuple of module names, or 'all-linear'"
        raise ConfigError("Lora.target_modules", f"got {_check.describe(names)}", expected)
    return tuple(names)


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
        target_modules: names of modules, as in peft; then the flags for MLPs and attention stay True. "all-linear" is
            attention and MLP, and not the output head.

    >>> Lora(target_modules="all-linear") == Lora(train_unembed=False)
    True
    """

    rank: int = checked(32, _check.integer, low=1)
    alpha: float = checked(32.0, _check.real, above=0.0)
    seed: int | None = checked(None, _check.integer, none=True, low=0)
    train_mlp: bool = checked(True, _check.flag)
    train_attn: bool = checked(True, _check.flag)
    train_unembed: bool | None = checked(None, _check.flag, none=True)
    target_modules: tuple[str, ...] | None = attrs.field(default=None, converter=_check_modules)

    def __attrs_post_init__(self) -> None:
        if self.target_modules is not None and not (self.train_mlp and self.train_attn):
            raise ConfigError("Lora", "has target_modules and train_mlp=False or train_attn=False", "one of them")
        if self.target_modules == (ALL_LINEAR,):
            object.__setattr__(self, "target_modules", None)
            object.__setattr__(self, "train_unembed", bool(self.train_unembed))
        trains = self.train_mlp or self.train_attn or self.train_unembed is not False
        if self.target_modules is None and not trains:
            raise ConfigError("Lora: train_mlp, train_attn and train_unembed are all False; nothing would train")
