"""Checks of arguments. Each returns the value in its proper type or raises an error that says where, what,
what was expected, and why.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

import numpy as np

from rlkit.errors import ArgumentError, ConfigError, DataError, RlkitError

_BOUNDS = "rlkit's bounds apply to the ratio: for 0.2 write clip_low_threshold=1 - 0.2 and clip_high_threshold=1 + 0.2"
_KL = "add a KL with rlkit.losses.with_kl(loss, coef=...), or to the rewards with rlkit.advantages.kl_penalty"
_GROUP = "a group is a row of the rewards: give them as [prompts, samples], or use rlkit.advantages.by_group"

_SAMPLING = (
    "max_tokens max_new_tokens stop temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
)

_Answers = Mapping[str, str]  # answer -> the names that get it


def _by_name(answers: _Answers) -> dict[str, str]:
    return {name: answer for answer, names in answers.items() for name in names.split()}


_ARGUMENTS: Mapping[str, _Answers] = {
    "Adam": {
        "learning_rate": "lr",
        "write beta1= and beta2=": "betas",
        "eps": "epsilon",
        "grad_clip_norm": "max_grad_norm max_norm grad_clip clip_grad clip_grad_norm gradient_clip_norm",
        "weight_decay": "wd",
    },
    "SamplingParams": {
        "max_tokens": "max_new_tokens max_length max_completion_length max_completion_tokens max_response_tokens",
        "pass n to the call: sampler.sample(prompt, params, n=8)": (
            "n num_generations num_return_sequences num_samples"
        ),
        "pass the seed to the call: sampler.sample(prompt, params, seed=0)": "seed",
        "temperature=0 is greedy, anything above samples": "do_sample",
        "stop": "stop_strings stop_sequences stop_token_ids",
        "the model's end tokens always stop; stop= adds others": "eos_token_id",
        "every sample has logprobs": "logprobs",
        "repetition_penalty": "rep_penalty",
        "frequency_penalty": "freq_penalty",
    },
    "Lora": {
        "rank": "r lora_r lora_rank",
        "alpha": "lora_alpha",
        "rlkit does not support dropout": "lora_dropout dropout",
        "target_modules": "modules lora_target_modules",
    },
    "Plan": {
        "n": "num_generations group_size num_samples",
        "max_turns": "max_steps",
        "params": "sampling_params",
        "pass it in params=rlkit.SamplingParams(...)": _SAMPLING,
    },
    "connect": {
        "model": "model_name model_id base_model model_path model_name_or_path pretrained_model_name_or_path",
        "lora": "peft_config lora_config",
        "dtype": "torch_dtype",
        "max_length": "max_seq_length",
        "folder": "output_dir save_dir",
        "resume_from": "checkpoint",
        "pass it to each step: policy.optim_step(rlkit.Adam(learning_rate=...))": "lr learning_rate",
        "write lora=rlkit.Lora(rank=..., alpha=...)": "r rank lora_rank lora_r lora_alpha alpha",
    },
    "estimators": {
        "eps": "epsilon",
        _GROUP: "group_size num_generations n",
        "scale": "scale_rewards normalize norm_adv_by_std_in_grpo",
        "gamma": "discount",
        "lam": "lmbda lambda_ gae_lambda",
        "bootstrap_value": "last_value next_value",
        _KL: "beta kl_coef",
    },
    "losses": {
        _BOUNDS: (
            "clip_eps eps_clip epsilon epsilon_low epsilon_high clip_epsilon eps_low clip_ratio clip_ratio_low "
            "clip_ratio_high clip_range cliprange eps_high"
        ),
        "dual_clip": "delta clip_ratio_c",
        _KL: "beta kl_coef kl_beta kl_loss_coef",
        "add an entropy with rlkit.losses.with_entropy(loss, coef=...)": "entropy_coef entropy_coeff ent_coef",
        "set weights= of the datums, computed by rlkit.advantages.token_weights": "loss_agg_mode",
    },
    "assign": {
        "estimator": "adv_estimator advantage_estimator advantage",
        "kl_coef": "beta kl_beta kl_loss_coef kl_ctrl",
        "kl_estimator": "kl_penalty kl_loss_type",
        "reference": "ref ref_policy ref_model reference_policy ref_worker",
        "rewards": "reward token_level_rewards token_level_scores",
        "weights": "loss_agg_mode",
        "settings of the estimator go into config={...}": "gamma lam eps norm_adv_by_std_in_grpo scale num_repeat",
    },
    "sample": {
        "pass it in the params: rlkit.SamplingParams(...)": _SAMPLING,
        "n": "num_samples num_return_sequences num_generations",
        "params": "sampling_params",
    },
    "forward_backward": {"loss": "loss_fn", "config": "loss_fn_config", "data": "datums batch"},
    "optim_step": {"params": "adam_params", "write optim_step(rlkit.Adam(learning_rate=...))": "lr learning_rate"},
}

_MEMBERS: Mapping[str, _Answers] = {
    "sample": {
        "decode the text: policy.tokenizer.decode(sample.tokens)": "text completion response content",
        "use sample.tokens": "token_ids completion_ids ids",
        "use sample.prompt": "prompt_ids",
        "use sample.stop_reason": "finish_reason",
        "use sample.logprobs": "log_probs logprob",
    },
    "output": {
        "use output.metrics['loss:sum'], a sum over tokens": "loss",
        "use output.logprobs, or output.selected for the policy's tokens": "log_probs",
    },
    "policy": {
        "save(name) writes the weights": "model parameters state_dict train eval",
        "call forward_backward(data, loss), then optim_step(rlkit.Adam())": "backward train_step",
        "call optim_step(rlkit.Adam()), which clears the gradient": "step zero_grad optimizer",
        "open a sampler: policy.sampler().result().sample(prompt, params, n=8)": "sample generate chat",
        "save(name) returns a path; `rlkit checkpoints RUN --export FOLDER` exports it as an adapter": (
            "save_pretrained push_to_hub"
        ),
        "call policy.tokenizer.encode and policy.tokenizer.decode": "encode decode",
    },
    "sampler": {
        "call sample(prompt, params, n=8)": "generate chat completions",
        "a sampler is frozen; train its policy": "forward_backward optim_step save",
    },
}

_INPUTS: _Answers = {  # of losses
    "reference_logprobs": "ref_logprobs ref_logps ref_log_prob reference_logps",
    "sampling_logprobs": "old_logps old_log_prob old_log_probs",
    "logprobs": "logps log_prob log_probs",
    "a loss gets only the policy's tokens, so it needs no mask": ("mask loss_mask response_mask completion_mask"),
    "weights": "weight",
    "advantages": "advantage",
}

VALUES = _by_name({"k1": "kl", "k2": "mse", "k3": "low_var_kl"})  # of estimators of a KL
ALIASES = {kind: _by_name(answers) for kind, answers in _ARGUMENTS.items()}
ATTRIBUTES = {kind: _by_name(answers) for kind, answers in _MEMBERS.items()}
INPUTS = _by_name(_INPUTS)


def answer(kind: str, name: str, known: Container[str]) -> str:
    """Return a hint about ``name``, "" without one; a hint that is itself a name must be among the ``known``."""
    hint = ALIASES.get(kind, {}).get(name, "")
    if hint.isidentifier():
        return f"; write {hint}=" if hint in known else ""
    return f"; {hint}" if hint else ""


def input_hint(name: str) -> str:
    """Return what an input of a loss is called here, where other libraries call it ``name``; "" where none does."""
    known = INPUTS.get(name, "")
    return f"; rlkit calls it {known!r}" if known.isidentifier() else f"; {known}" if known else ""


P = ParamSpec("P")
T = TypeVar("T")
_SHOWN = 60


def shown(value: object) -> str:
    """Return ``value`` as it appears in an error message: short, with its type."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    if len(text) > _SHOWN:
        text = text[: _SHOWN - 3] + "..."
    return text if value is None else f"{text} ({type(value).__name__})"


def problem(where: str, what: str, expected: str, why: str = "") -> str:
    """Format an error message: ``where: what; expected ... (why)``."""
    return str(RlkitError(where, what, expected, why))


def require(
    good: object, where: str, value: object, expected: str, why: str = "", *, error: type[RlkitError] = ConfigError
) -> None:
    """Raise unless ``good``, a test of ``value``, holds.

    >>> require(callable(3), "Task.make", 3, "a callable")
    Traceback (most recent call last):
    rlkit.errors.ConfigError: Task.make: got 3 (int); expected a callable
    """
    if not good:
        raise error(where, f"got {shown(value)}", expected, why)


def near(name: str, known: Iterable[str]) -> str:
    """Return the suffix of an unknown-name error: the closest match, and all known names.

    >>> near("rad", ["red", "blue"]), near("x", ["red", "blue"])
    ("; did you mean 'red'? There are: red, blue", '. There are: red, blue')
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (f"; did you mean {close[0]!r}?" if close else ".") + f" There are: {', '.join(known) or 'none'}"


def members(where: str, thing: object, protocol: type, hint: str = "") -> None:
    """Raise ConfigError for an object that lacks public members of a protocol.

    >>> from collections.abc import Sized
    >>> class Growing(Sized):
    ...     def grow(self) -> None: ...
    >>> members("connect(x)", 3, Growing)
    Traceback (most recent call last):
    rlkit.errors.ConfigError: connect(x): got 3 (int), which has no grow; expected a Growing
    """
    lacking = [name for name in vars(protocol) if not name.startswith("_") and not hasattr(thing, name)]
    if lacking or isinstance(thing, type):
        what = f"got {shown(thing)}, which " + (f"has no {', '.join(lacking)}" if lacking else "is a class")
        raise ConfigError(where, what, f"a {protocol.__name__}", hint)


def options(
    where: str, make: Callable[..., object], given: Mapping[str, object], *, kind: str = "", more: Iterable[str] = ()
) -> None:
    """Raise ArgumentError for a keyword that ``make`` does not take.

    Args:
        where: what was called.
        make: the function that gets the keywords.
        given: the keywords.
        kind: whose aliases are known.
        more: keywords that are not for ``make``, which may have been meant.
    """
    known = inspect.signature(make).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for name in given:
            if name not in known:
                hint = answer(kind, name, known) or near(name, [*known, *more])
                raise ArgumentError(f"{where}: no option {name!r}{hint}")


def integer(
    where: str,
    value: object,
    *,
    low: int | None = None,
    high: int | None = None,
    why: str = "",
    error: type[RlkitError] = ConfigError,
) -> int:
    """Return ``value`` as an int in [low, high]; booleans and floats are refused."""
    expected = "an integer" + _interval(low, high)
    value = plain(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise error(where, f"got {shown(value)}", expected, why)
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise error(where, f"got {number}", expected, why)
    return number


def real(
    where: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    why: str = "",
    error: type[RlkitError] = ConfigError,
) -> float:
    """Return ``value`` as a finite float in [low, high], or in the open interval (above, below)."""
    bounds = [f">= {low}"] * (low is not None) + [f"> {above}"] * (above is not None)
    bounds += [f"<= {high}"] * (high is not None) + [f"< {below}"] * (below is not None)
    expected = "a finite number" + (" " + " and ".join(bounds) if bounds else "")
    value = plain(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise error(where, f"got {shown(value)}", expected, why)
    number = float(value)
    inside = (
        math.isfinite(number)
        and (low is None or number >= low)
        and (high is None or number <= high)
        and (above is None or number > above)
        and (below is None or number < below)
    )
    if not inside:
        raise error(where, f"got {value}", expected, why)
    return number


def temperature(where: str, value: object, *, zero: bool, error: type[RlkitError] = ConfigError) -> float:
    """Return ``value`` if in [1e-3, 1e3], where logits divided by it stay finite, or 0 where that may mean greedy."""
    number = real(where, value, low=0.0, error=error)
    if (number == 0 and not zero) or (number != 0 and not 1e-3 <= number <= 1e3):
        expected = "a number in [0.001, 1000]" + (", or 0 for greedy" if zero else "")
        raise error(where, f"got {value}", expected)
    return number


def flag(where: str, value: object, *, error: type[RlkitError] = ConfigError) -> bool:
    """Return ``value`` as a bool; 0, 1 and None are refused."""
    value = plain(value)
    if not isinstance(value, bool):
        raise error(where, f"got {shown(value)}", "True or False")
    return value


def plain(value: object) -> object:
    """Return Python's own number for a scalar of numpy or torch, or for an array without dimensions.

    >>> plain(np.float32(0.5)), plain(np.array(3)), plain([0.5])
    (0.5, 3, [0.5])
    """
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def convert(thing: object, names: str, check: Callable[..., object], *, none: bool = False, **limits: object) -> None:
    """Set fields of an instance of attrs, frozen or not, to what ``check`` returns for them.

    Args:
        thing: the instance; an error names its class and the field.
        names: of the fields, with spaces between.
        check: a check of this module.
        none: whether None is allowed, and stays.
        limits: keyword arguments of ``check``.
    """
    for name in names.split():
        value = getattr(thing, name)
        if value is not None or not none:
            object.__setattr__(thing, name, check(f"{type(thing).__name__}.{name}", value, **limits))


def entries(where: str, value: object, count: int | None = None, why: str = "") -> None:
    """Raise DataError unless ``value`` is a sequence or array, of ``count`` entries where that is given."""
    sized: Any = value
    listed = hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "ndim", 1) != 0
    if isinstance(value, (str, bytes, Mapping)) or not listed:
        raise DataError(where, f"got {shown(value)}", "a sequence" + f" of {count}" * (count is not None), why)
    if count is not None and len(sized) != count:
        raise DataError(where, f"has {len(sized)} entries", f"{count}", why)


def optional(
    check: Callable[Concatenate[str, object, P], T], where: str, value: object, *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """Apply a check unless ``value`` is None."""
    return None if value is None else check(where, value, *args, **kwargs)


def choice(where: str, value: object, options: tuple[str, ...], *, error: type[RlkitError] = ConfigError) -> str:
    """Return ``value`` if it is one of ``options``.

    >>> choice("kl_estimator", "low_var_kl", ("k1", "k3"))
    Traceback (most recent call last):
    rlkit.errors.ConfigError: kl_estimator: got 'low_var_kl' (str); expected one of 'k1', 'k3' (here it is 'k3')
    """
    if not isinstance(value, str) or value not in options:
        known = VALUES.get(value) if isinstance(value, str) else None
        why = f"here it is {known!r}" if known in options else ""
        raise error(where, f"got {shown(value)}", "one of " + ", ".join(map(repr, options)), why)
    return value


def token_ids(where: str, value: object, *, vocab_size: int | None = None, low_length: int = 0) -> np.ndarray:
    """Return ``value`` as a read-only int64 array [T] of non-negative ids; text, floats and booleans are refused."""
    if isinstance(value, (str, bytes)):
        raise DataError(where, f"got text {shown(value)}", "token ids", "encode it with the tokenizer")
    array = as_array(where, value, "a 1-D sequence of token ids")
    if array.ndim == 1 and array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(where, f"got {shown(array)}", "a 1-D sequence of integers")
    if array.size < low_length:
        raise DataError(where, f"has length {array.size}", f"at least {low_length} token(s)")
    high = (vocab_size if vocab_size is not None else 2**63) - 1
    bad = np.flatnonzero((array < 0) | (array > high))
    if bad.size:
        bound = f"an id in [0, {high}]" if vocab_size is not None else "an id >= 0"
        raise DataError(f"{where}[{bad[0]}]", f"is {array[bad[0]]}", bound, "the tokenizer has no such token")
    return frozen(array.astype(np.int64))


def messages(where: str, value: object) -> list[Mapping[str, object]]:
    """Return ``value`` as a list of chat messages, mappings with at least a role and content (or tool calls)."""
    expected = 'a list of messages, such as [{"role": "user", "content": "..."}]'
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence) or not value:
        raise DataError(where, f"got {shown(value)}", expected)
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or "role" not in message:
            raise DataError(f"{where}[{i}]", f"got {shown(message)}", "a mapping with a role", expected)
        if "content" not in message and "tool_calls" not in message:
            raise DataError(f"{where}[{i}]", f"has no content, only {sorted(map(str, message))}", expected)
    return list(value)


def roles(messages: Sequence[Mapping[str, object]]) -> str:
    """Return the roles of messages, for an error about them."""
    names = [str(message.get("role")) for message in messages]
    return ", ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-3:]])


def as_array(where: str, value: object, expected: str) -> np.ndarray:
    """Return ``value`` as an array of numbers; ragged lists, None and objects are refused."""
    if value is None:
        raise DataError(where, "is None", expected)
    try:
        array = np.asarray(_of_tensors(value))
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(where, f"got {shown(value)}", expected, str(error)) from error
    if array.dtype.kind not in "iufb":
        raise DataError(where, f"got {shown(value)}", expected)
    return array


def _of_tensors(value: object) -> object:
    """Return ``value`` with torch's tensors, also in a list, turned into arrays; torch is not imported."""
    if isinstance(value, (list, tuple)) and any(hasattr(x, "detach") for x in value):
        return [_of_tensors(x) for x in value]
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return (tensor if tensor.dtype.itemsize > 2 or not tensor.dtype.is_floating_point else tensor.float()).numpy()


def squeeze(shape: Sequence[int]) -> str:
    """Return the advice for a matrix where a row was expected."""
    return "squeeze it: one per token" if 1 in shape else "one per token"


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a read-only copy, so that what was checked stays as it was."""
    array = np.array(array)
    array.flags.writeable = False
    return array


def _interval(low: int | None, high: int | None) -> str:
    if low is not None and high is not None:
        return f" in [{low}, {high}]"
    if low is not None:
        return f" >= {low}"
    return f" <= {high}" if high is not None else ""


class Uncalled:
    """A tokenizer that users of transformers may try to call."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise an ArgumentError that names the methods."""
        del args, kwargs
        raise ArgumentError(
            f"{type(self).__name__}: is not callable; use encode(text) for ids, int64 [T], decode(ids) for text, and "
            "apply_chat_template(messages) for a prompt"
        )


def answered(thing: T) -> T:
    """Decorate a function or class: a call that does not fit its signature raises an ArgumentError with a hint.

    Use it for what a first program calls: the types of ``rlkit.types``, the backends' verbs and ``credit.assign``.

    Args:
        thing: the function, or the class, whose ``__init__`` is wrapped.

    >>> @answered
    ... def area(width, *, height=1.0): return width * height
    >>> area(2.0, heigth=3.0)
    Traceback (most recent call last):
    rlkit.errors.ArgumentError: area: no argument 'heigth'; did you mean 'height'? There are: width, height
    """
    target: Any = thing
    function: Callable[..., object] = target.__init__ if inspect.isclass(target) else target
    name = str(target.__name__)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            text = _misfit(function, args, kwargs, name)
            if text:
                raise ArgumentError(f"{name}: {text}") from None
            raise  # it comes from inside

    if inspect.isclass(target):
        target.__init__ = call  # type: ignore[method-assign]
        return thing
    return call  # type: ignore[return-value]


def hinted(kind: str) -> Callable[[T], T]:
    """Decorate a class: an attribute that it lacks, and that other libraries have, raises an error with a hint.

    It stays an AttributeError, so that ``hasattr`` and ``getattr`` with a default work as before.
    """
    hints = ATTRIBUTES[kind]

    def lacking(self: object, name: str) -> NoReturn:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{text}; {hints[name]}" if name in hints else text, name=name, obj=self)

    def add(thing: T) -> T:
        if not any("__getattr__" in vars(base) for base in cast("type", thing).__mro__):
            cast("Any", thing).__getattr__ = lacking
        return thing

    return add


def _misfit(function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], kind: str) -> str:
    """Return why the call does not fit the signature; "" where it fits."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        problem = str(error)
    else:
        return ""
    known = {key: p for key, p in signature.parameters.items() if key != "self"}
    positional = len(args) - ("self" in signature.parameters)
    return _unknown(known, kwargs, kind) or _excess(known, positional) or _lacking(known, positional, kwargs) or problem


_Parameters = Mapping[str, inspect.Parameter]


def _unknown(known: _Parameters, kwargs: Iterable[str], kind: str) -> str:
    """Return the message for the first unknown keyword; "" if all are known."""
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return ""
    key = next((key for key in kwargs if key not in known), None)
    return "" if key is None else f"no argument {key!r}" + (answer(kind, key, known) or near(key, known))


def _ordered(known: _Parameters) -> list[str]:
    return [key for key, p in known.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _excess(known: _Parameters, positional: int) -> str:
    """Return the text on more positional arguments than the function takes; "" where it takes them."""
    ordered = _ordered(known)
    if positional <= len(ordered):
        return ""
    named = [f"{key}=" for key, p in known.items() if p.kind is p.KEYWORD_ONLY]
    named += [key for key, p in known.items() if p.kind is p.VAR_KEYWORD]
    rest = f"; by name only: {', '.join(named)}" if named else ""
    return f"got {positional} positional arguments; it takes {', '.join(ordered) or 'none'}{rest}"


def _lacking(known: _Parameters, positional: int, kwargs: Container[str]) -> str:
    """Return the text on required arguments that are missing; "" where none is."""
    given = _ordered(known)[: max(0, positional)]
    lacking = [
        f"{key}="
        for key, p in known.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and key not in kwargs
        and key not in given
    ]
    return f"lacks {', '.join(lacking)}" if lacking else ""
