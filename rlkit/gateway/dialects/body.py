"""Common parts of the dialects: the fields of a client's JSON, and the call made from them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import attrs

from rlkit import _check
from rlkit.errors import DataError, RlkitError
from rlkit.gateway.types import Draw, GatewayError, Reply, Request

if TYPE_CHECKING:
    from rlkit.gateway._session import Session

__all__ = ["Body", "Call", "Event", "Json", "as_request_errors", "asks_for_json", "count", "draw", "refuse", "wrong"]

Json: TypeAlias = dict[str, object]
Event: TypeAlias = tuple[str | None, Json | str]
"""The name of a server-sent event, if it has one, and its data."""


@attrs.frozen(eq=False)
class Call(ABC):
    """One call of an endpoint.

    Attributes:
        session: the session or gateway that answers.
        requests: the requests to sample; several where a call has several prompts. They are answered concurrently.
        stream: whether the client wants server-sent events.
    """

    session: Session
    requests: Sequence[Request]
    stream: bool

    @abstractmethod
    def body(self, replies: Sequence[Reply]) -> Json:
        """Return the JSON answer made from one reply per request."""

    @abstractmethod
    def events(self, replies: Sequence[Reply]) -> Iterator[Event]:
        """Yield the same as a stream."""

    def failed(self, error: Mapping[str, object]) -> Iterator[Event]:
        """Yield the end of a stream that has begun: ``error`` is the JSON of an error."""
        yield None, dict(error)


def count(replies: Sequence[Reply]) -> tuple[int, int]:
    """Return the number of tokens in the prompts and in the completions."""
    drawn = sum(choice.sample.tokens.size for reply in replies for choice in reply.choices)
    return sum(int(reply.prompt.size) for reply in replies), int(drawn)


T = TypeVar("T", bound=str)


class Body:
    """A JSON object. ``null`` counts as absent.

    Args:
        value: the JSON value.
        where: its path in the request, "" for the whole.

    Raises:
        GatewayError: 400 with ``param``, from here and from every method, where a value is not valid.

    >>> body = Body({"tools": [{"type": "function"}], "n": 2, "stop": None})
    >>> body.integer("n", low=1), body.get("stop"), [tool.where for tool in body.objects("tools")]
    (2, None, ['tools[0]'])
    >>> body.text("n")
    Traceback (most recent call last):
    rlkit.gateway.types.GatewayError: n: got 2 (int); expected a string
    """

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, Mapping):
            raise wrong(where or "body", value, "an object")
        self.value: Mapping[str, object] = value
        self.where = where

    def path(self, name: str) -> str:
        """Return the path of a field in the request."""
        return f"{self.where}.{name}" if self.where else name

    def get(self, name: str) -> object:
        """Return a field as it is."""
        return self.value.get(name)

    def text(self, name: str) -> str | None:
        """Return a string."""
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value
        raise wrong(self.path(name), value, "a string")

    def require_text(self, name: str) -> str:
        """Return a string that must be there."""
        value = self.text(name)
        if value is None:
            raise self.missing(name)
        return value

    def missing(self, name: str, expected: str = "") -> GatewayError:
        """Return the error for a field that must be there."""
        where = self.path(name)
        return GatewayError(400, f"{where}: is missing{expected}", param=where)

    def choice(self, name: str, choices: Collection[T]) -> T | None:
        """Return one of some strings."""
        value = self.get(name)
        for choice in choices:
            if value == choice:
                return choice
        if value is None:
            return None
        raise wrong(self.path(name), value, "one of: " + ", ".join(choices))

    def integer(self, name: str, *, low: int | None = None, high: int | None = None) -> int | None:
        """Return an integer in [low, high]."""
        value = self.get(name)
        if value is None:
            return None
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        expected = (
            "an integer" + (f" >= {low}" if low is not None else "") + (f" <= {high}" if high is not None else "")
        )
        if isinstance(number, bool) or not isinstance(number, int):
            raise wrong(self.path(name), value, expected)
        if (low is not None and number < low) or (high is not None and number > high):
            raise wrong(self.path(name), value, expected)
        return number

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a finite number in [low, high]."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise wrong(self.path(name), value, f"a number in [{low}, {high}]")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a boolean; False if absent."""
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise wrong(self.path(name), value, "true or false")

    def body(self, name: str) -> Body | None:
        """Return an object."""
        value = self.get(name)
        return None if value is None else Body(value, self.path(name))

    def items(self, name: str, expected: str = "a list") -> list[object]:
        """Return a list; an empty one if absent."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise wrong(self.path(name), value, expected)
        return value

    def parts(self, name: str) -> Iterator[Body]:
        """Yield the parts of a content that is not a string."""
        return self.objects(name, "text, or a list of parts")

    def objects(self, name: str, expected: str = "a list") -> Iterator[Body]:
        """Yield the objects of a list."""
        for i, value in enumerate(self.items(name, expected)):
            yield Body(value, f"{self.path(name)}[{i}]")

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the strings of a list, or the single string; none of them is empty."""
        value = self.get(name)
        values = [value] if isinstance(value, str) else self.items(name)
        for i, each in enumerate(values):
            if not isinstance(each, str) or not each:
                raise wrong(f"{self.path(name)}[{i}]", each, "a non-empty string")
        return tuple(each for each in values if isinstance(each, str))

    def tokens(self, name: str) -> list[int]:
        """Return the token ids of a list."""
        values = self.items(name)
        for i, each in enumerate(values):
            if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < 2**63:
                raise wrong(f"{self.path(name)}[{i}]", each, "a token id, an integer >= 0")
        return [each for each in values if isinstance(each, int)]

    def require_choice(self, name: str, choices: Collection[T]) -> T:
        """Return one of some strings, that must be there."""
        value = self.choice(name, choices)
        if value is None:
            raise self.missing(name)
        return value


def wrong(where: str, value: object, expected: str, why: str = "") -> GatewayError:
    """Return the error for a value.

    >>> print(wrong("messages[0].role", "robot", "one of: system, user", "of the chat").message)
    messages[0].role: got 'robot' (str); expected one of: system, user (of the chat)
    """
    return GatewayError(400, str(RlkitError(where, f"got {_check.describe(value)}", expected, why)), param=where)


@contextlib.contextmanager
def as_request_errors() -> Iterator[None]:
    """Turn a DataError about a field of the request into the answer 400 that names it."""
    try:
        yield
    except DataError as error:
        raise GatewayError(400, str(error), param=str(error).partition(": ")[0]) from error


def refuse(body: Body, unsupported: Mapping[str, Collection[object]]) -> None:
    """Raise GatewayError for an unsupported field that would change the sampling or the answer.

    Args:
        body: of the request.
        unsupported: name -> the values that change nothing, besides null, "", [] and {}.

    >>> refuse(Body({"logit_bias": {}, "best_of": 1}), {"logit_bias": (), "best_of": (1,)})
    >>> refuse(Body({"logit_bias": {"5": 1}}), {"logit_bias": ()})
    Traceback (most recent call last):
    rlkit.gateway.types.GatewayError: logit_bias: is not supported here, and would not be without effect
    """
    for name, harmless in unsupported.items():
        value = body.get(name)
        nothing = value is None or (isinstance(value, (str, list, dict)) and not value)
        same = any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless)
        if not nothing and not same:
            where = body.path(name)
            raise GatewayError(400, f"{where}: is not supported, and ignoring it would change the answer", param=where)


_CONSTRAINTS: Final = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_ON_TOKENS: Final = ("logit_bias", "structural_tag", "bad_words", "allowed_token_ids", "logits_processors")
_OTHERS: Final = ("thinking_token_budget", "truncate_prompt_tokens", "prompt_embeds", "repetition_detection")
_ON_TEXT: Final = {
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
_UNSUPPORTED_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys((*_CONSTRAINTS, *_ON_TOKENS, *_OTHERS), ()),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}


def draw(body: Body, session: Session, max_tokens: int | None, *, tokens_only: bool = False) -> Draw:
    """Return the sampling settings.

    Args:
        body: with the fields of the completions APIs and those that vLLM adds.
        session: its tokenizer spells the ids of ``stop_token_ids`` if there are texts to stop at, too.
        max_tokens: as the client gave it.
        tokens_only: no text is returned, so that fields about text have no effect.
    """
    unsupported = {**_UNSUPPORTED_OPTIONS, **({} if tokens_only else _ON_TEXT)}
    if body.flag("return_token_ids"):  # special tokens are among the ids, whatever the text shows
        unsupported.pop("skip_special_tokens", None)
    refuse(body, unsupported)
    temperature = body.number("temperature", 0.0, 1000.0)
    if temperature is not None and 0.0 < temperature < 0.001:
        raise wrong(body.path("temperature"), temperature, "0, or a number in [0.001, 1000]")
    top_p = body.number("top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise wrong(body.path("top_p"), 0, "a number above 0 and at most 1", "temperature 0 is greedy")
    top_k = body.integer("top_k", low=-1, high=2**31 - 1)
    seed = body.integer("seed", low=-(2**63), high=2**64 - 1)
    return Draw(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=-1 if top_k == 0 else top_k,
        min_p=body.number("min_p", 0.0, 1.0),
        repetition_penalty=body.number("repetition_penalty", 0.001, 1000.0),
        presence_penalty=body.number("presence_penalty", -2.0, 2.0),
        frequency_penalty=body.number("frequency_penalty", -2.0, 2.0),
        stop=_stop(body, session),
        ignore_eos=body.flag("ignore_eos"),
        seed=None if seed is None else seed % 2**64,
        json_field=asks_for_json(body, "response_format"),
    )


def asks_for_json(body: Body, name: str) -> str:
    """Return the path of the field that requests JSON, which is not enforced; "" without one."""
    if not body.get(name):
        return ""
    form = Body(body.get(name), body.path(name))
    kind = form.require_choice("type", ("text", "json_object", "json_schema"))
    return "" if kind == "text" else form.where


def _stop(body: Body, session: Session) -> tuple[str, ...] | tuple[int, ...]:
    texts, ids = body.texts("stop"), tuple(body.tokens("stop_token_ids"))
    for i, token in enumerate(ids):
        if token >= session.tokenizer.vocab_size:
            raise wrong(f"{body.path('stop_token_ids')}[{i}]", token, f"less than {session.tokenizer.vocab_size}")
    if len(texts) + len(ids) > 128:
        raise wrong(body.path("stop"), len(texts) + len(ids), "at most 128 stops")
    if not texts:
        return tuple(dict.fromkeys(ids))
    spelled = [session.tokenizer.decode([token], skip_special=False) for token in ids]
    return tuple(dict.fromkeys([*texts, *spelled]))
