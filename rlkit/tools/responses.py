"""Turns read by the response template that a tokenizer of transformers carries, before any format of rlkit's own."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlkit import _check
from rlkit._interaction import Message
from rlkit._runtime import warn
from rlkit.tools._reading import Findings
from rlkit.tools.types import Malformed, Parsed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ResponseReader", "response_reader"]

_CHUNK = 256  # characters; the parser searches all that it was given for each delimiter again after every call
_BLANKS = re.compile(r"\s{1000}")  # delimiters that skip white space take time that grows with the square of its length
_REASONING = ("reasoning_content", "reasoning", "thinking")
_EXPECTED = "text, or calls in the model's own format"


def response_reader(tokenizer: object) -> ResponseReader | None:
    """Return what reads turns by the tokenizer's ``response_template``; None where it has none.

    A template that cannot be used is left alone, with a warning: rlkit's formats read the turns then.
    """
    hf: PreTrainedTokenizerBase | None = getattr(tokenizer, "hf", None)
    if getattr(hf, "response_template", None) is None or not hasattr(hf, "get_response_parser"):
        return None
    try:
        return ResponseReader(hf)
    except Exception as error:  # noqa: BLE001  # it comes from the model's folder, and was not asked for
        where = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        warn(f"Chat: the tokenizer's response template cannot be used ({where})", RuntimeWarning)
        return None


class ResponseReader:
    """A reader of turns by a response template.

    It is the parser of ``parse_response``, fed in pieces: all at once it takes time that grows with the third power of
    the number of calls, and forgets what was said between two calls.
    """

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        hf.get_response_parser(prefix="")  # checks the template
        self._hf = hf
        self._regex = importlib.import_module("regex")  # which transformers compiles the template's patterns with
        template = hf.response_template
        anchors = template.get("start_anchor", ())
        literal = "|".join(map(re.escape, [anchors] if isinstance(anchors, str) else anchors))
        self._anchor = self._regex.compile(template.get("start_anchor_pattern") or literal, self._regex.DOTALL)
        self._field = template["fields"].get("tool_calls", {})
        opened = str(self._field.get("open") or self._field.get("open_pattern") or "")
        added = [token.content for token in hf.added_tokens_decoder.values()]
        self._opening = tuple(text for text in added if text in opened or re.escape(text) in opened)

    def read(self, text: str, prompt: str, tools: Sequence[Message]) -> Parsed | Malformed:
        """Return reasoning, content and calls of a turn; ``Malformed`` where the template cannot read all of it.

        Args:
            text: the turn, with special tokens.
            prompt: the text that it was sampled for, which may have begun the turn.
            tools: the schemas of the conversation, OpenAI style; where the format writes arguments as text, they are
                converted by these. JSON has types: "7" for an integer is a mistake that the policy is told.
        """
        if _BLANKS.search(text):
            return _unread("it has more than 1000 blanks in a row")
        begun = [match.end() for match in self._anchor.finditer(prompt)]
        head = prompt[begun[-1] :] if begun else ""
        try:
            return self._fold(self._events(text, head, tools), text)
        except Exception as error:  # noqa: BLE001  # the policy chose the text, and is to be told
            return _unread(f"{type(error).__name__}: {' '.join(str(error).split())[:80]}")

    def _events(self, text: str, head: str, tools: Sequence[Message]) -> Iterable[Mapping[str, object]]:
        schemas = None if self._field.get("content") == "json" else [dict(tool) for tool in tools]
        parser = self._hf.get_response_parser(prefix=head, tools=schemas)
        yield from parser.initial_events
        for start in range(0, len(text), _CHUNK):
            yield from parser.feed(text[start : start + _CHUNK])
        yield from parser.finalize()[1]

    def _fold(self, events: Iterable[Mapping[str, object]], text: str) -> Parsed:
        """Return what the events say; raise ValueError where a part of the turn was skipped."""
        findings, texts, body, at = Findings(text, _EXPECTED), dict[str, str](), "", 0
        for event in events:
            field = str(event["field"])
            if event["type"] == "region_open":
                body = ""
            elif event["type"] == "region_chunk":
                body += str(event["text"])
            elif field == "tool_calls":
                self._check(body)
                found = text.find(body, at)  # what a prefill had begun is not in it
                at = max(found, at)
                findings.calls_of(_functions(event["value"]), at)
                at += len(body) if found >= 0 else 0
                if findings.full:
                    break
            else:
                texts[field] = texts.get(field, "") + body
        arguments = [call.arguments for call in findings.calls]
        json.dumps(arguments, allow_nan=False)  # raises for what is not JSON
        _check.depth("the calls", arguments, most=_check.DEEPEST_CALL)
        content = texts.get("content", "").strip()
        left = [opening for opening in self._opening if opening in content]
        if left:
            raise ValueError(f"{left[0]} is not followed by a call")
        reasoning = next((texts[name].strip() for name in _REASONING if name in texts), None)
        return Parsed(content, tuple(findings.calls), tuple(findings.errors), reasoning)

    def _check(self, body: str) -> None:
        """Raise ValueError for text between parameters, and for one given twice: the parser skips them silently."""
        arguments = self._field.get("content_args", {})
        if self._field.get("content") != "xml-inline":
            return
        pattern = self._regex.compile(arguments["tag_pattern"], self._regex.DOTALL)
        keys = [match["key"] for match in pattern.finditer(body)]
        if pattern.sub("", body).strip():
            raise ValueError("there is text between the parameters")
        if len(set(keys)) < len(keys) and not arguments.get("merge_duplicates"):
            raise ValueError("a parameter comes twice")


def _functions(value: object) -> list[object]:
    """Return what a region's calls name and pass."""
    calls = value if isinstance(value, list) else [value]
    return [call.get("function", call) if isinstance(call, Mapping) else call for call in calls]


def _unread(why: str) -> Malformed:
    return Malformed(f"the turn cannot be read ({why})", _EXPECTED)
