"""Prompts written with the model's chat template, and text that cannot become control tokens.

Text that cannot become control tokens.

A chat template writes control tokens (``<|im_end|>``) as text, and so can an environment, a user or a tool. Both come
out of the template as one string, so the difference has to travel inside it: contents are marked before they are
rendered. A marked string has an invisible separator after the first character of each control token's text; it ends a
piece of text when the rendering is encoded, and control tokens do not grow across pieces. Text without such strings is
not changed at all, so its tokens are those of the plain rendering.

The prompts of a conversation, written with the model's chat template.

Messages are marked here: see ``ControlText``. ``rlkit.chat._rendering`` has the same methods over a renderer.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from rlkit import _check, _runtime
from rlkit._interaction import Action, Message
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.nodes import Node
    from jinja2.parser import Parser

    from rlkit.chat._core import Chat

__all__ = ["CUT", "PLACEHOLDER", "ControlText", "Template", "TemplatePrompts"]


class Template:
    r"""A chat template that turns messages into text.

    Args:
        text: Jinja, as models publish it.
        tokens: the texts that names of tokens refer to: ``{"bos_token": "<s>", ...}``.

    Attributes:
        names: the variables that the template reads.

    The clock that a template may ask for (``strftime_now``) stays at the time when the object was made, so that
    one text cannot come out in two ways.

    Raises:
        ConfigError: jinja2 is missing, or the text is not a valid template.

    >>> Template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").render(
    ...     [{"role": "user", "content": "Hi"}])
    'user: Hi\n'
    """

    def __init__(self, text: str, tokens: Mapping[str, str] | None = None) -> None:
        _check.require(isinstance(text, str) and text, "template", text, "the text of a chat template")
        try:
            import jinja2
            import jinja2.meta
        except ImportError as error:
            raise ConfigError(f"chat templates need jinja2; run: {_runtime.command('chat')}") from error
        environment = _environment(dt.datetime.now().astimezone())
        try:
            self._compiled = environment.from_string(text)
            self.names = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(text)))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"template: line {error.lineno}: {error.message}; expected a Jinja template") from error
        self.text = text
        self._tokens = dict(tokens or {})
        self._failures = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

    def render(self, messages: Sequence[Mapping[str, object]], *, head: bool = False, **variables: object) -> str:
        """Render ``messages`` as text.

        Args:
            messages: with ``role`` and ``content``, or what else the template reads.
            head: whether the head of the assistant's next turn follows ("generation prompt").
            variables: other variables of the template, ``tools`` and ``enable_thinking`` for example.

        Raises:
            DataError: the template refuses the messages.
        """
        names = {"tools": None, "documents": None} | self._tokens | variables
        try:
            text: str = self._compiled.render(names, messages=list(messages), add_generation_prompt=head)
        except (*self._failures, RecursionError, MemoryError) as error:
            what = f"the chat template refuses messages with the roles {_check.roles(messages)}"
            raise DataError(f"{what}: {str(error) or type(error).__name__}") from error
        return text

    @functools.cached_property
    def call_form(self) -> tuple[bool, bool] | None:
        """How the template reads tool calls: arguments as JSON text, and null for an empty content; None: it does not.

        Templates differ in both, and leave calls out silently, or fail, where these are given in another form.
        """
        function = {"name": "probe_name", "arguments": {"probe_key": 1}}
        call = {"id": "call00000", "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked: list[Message] = [{"role": "user", "content": "Q"}, turn]
        answered = [*asked, {"role": "tool", "content": "R", "tool_call_id": "call00000"}]
        other = {"type": "function", "function": {"name": "other", "description": "", "parameters": {"type": "object"}}}
        forms = [(as_text, null) for null in (False, True) for as_text in (False, True)]
        for tools, form in itertools.product((None, [other]), forms):
            try:
                texts = [
                    self.render(in_form(said, form), head=said is answered, tools=tools) for said in (asked, answered)
                ]
            except DataError:
                continue
            if all("probe_name" in text and "probe_key" in text for text in texts):
                return form
        return None

    @functools.cached_property
    def thoughts(self) -> str:
        """The name under which the template reads reasoning."""
        names = ("reasoning_content", "thinking", "reasoning")
        return next((x for x in names if re.search(rf"(?:\.|['\"]){x}\b", self.text)), names[0])


def in_form(messages: Sequence[Message], form: tuple[bool, bool], thoughts: str = "reasoning_content") -> list[Message]:
    """Return messages in the form that a template reads: see ``Template.call_form`` and ``Template.thoughts``."""
    return [_message_in_form(message, form, thoughts) for message in messages]


def _message_in_form(message: Message, form: tuple[bool, bool], thoughts: str) -> Message:
    as_text, null = form
    if "reasoning_content" in message and thoughts != "reasoning_content":
        message = {thoughts if name == "reasoning_content" else name: value for name, value in message.items()}
    if "tool_calls" not in message or form == (False, False):
        return message
    calls = message["tool_calls"]
    if as_text:
        functions = [(call, call["function"]) for call in calls]
        calls = [{**call, "function": {**f, "arguments": _json(f["arguments"])}} for call, f in functions]
    content = None if null and message["content"] == "" else message["content"]
    return {**message, "content": content, "tool_calls": calls}


def _environment(now: dt.datetime) -> Environment:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what the model wrote; as text it is nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now.strftime
    return environment


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON as transformers does; Jinja's own filter would write escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


CUT = "\U000f0010"  # private-use characters: they mean nothing to any model
PLACEHOLDER = "\U000f0011"
_FOREIGN = re.compile(f"[{CUT}{PLACEHOLDER}\ud800-\udfff]")  # ours, and surrogates, which are not text
_DEPTH = 64
_Json = TypeVar("_Json")


class ControlText:
    """Mark texts, and encode a template's rendering of them.

    Args:
        tokenizer: rlkit's protocol. Its optional attribute ``added_tokens`` (text -> whether it is special) says which
            texts are tokens of their own; without it the vocabulary is searched once.
        template: the template's text, or None. Tokens that are not special but are in it, ``<tool_call>`` say, are
            control tokens too when an environment writes them.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer = tokenizer
        added: Mapping[str, bool] | None = getattr(tokenizer, "added_tokens", None)
        if added is None:
            added = _special_by_search(tokenizer)
        special = [text for text, is_special in added.items() if is_special and text.strip()]
        written = [text for text in added if text in (template or "") and len(text.strip()) > 2]
        self._special = _pattern(special)
        self._all = _pattern([*special, *written])
        self._edges = tuple({text[:i] for text in (*special, *written) for i in range(1, len(text))})
        self._ids = {text: self._single(text) for text in special}
        self._special_ids = np.array(sorted(i for i in self._ids.values() if i is not None), np.int64)
        self._leads = _adds_a_prefix(tokenizer)

    @property
    def special_ids(self) -> np.ndarray:
        """Return int64 [K], sorted: the ids of the special tokens."""
        return self._special_ids

    def leading_ids(self, text: str) -> list[int]:
        """Return the ids of the control tokens that ``text`` begins with, white space aside."""
        ids: list[int] = []
        while self._all and (match := self._all.match(text := text.lstrip())):
            token = self._single(match[0])
            ids += [] if token is None else [token]
            text = text[match.end() :]
        return ids

    def mark(self, value: _Json, *, foreign: bool = True, where: str = "message") -> _Json:
        """Return ``value`` with every string in it marked: a string, or what JSON knows.

        Args:
            value: is not changed.
            foreign: from an environment. Otherwise (the program's or the policy's own text) only the special tokens
                are control tokens.
            where: what an error names.

        Raises:
            DataError: something that is not JSON, or nested more than 64 deep.
        """
        return cast("_Json", self._marked(value, self._all if foreign else self._special, where, 0))

    def encode(self, text: str, *, first: bool = True) -> np.ndarray:
        """Encode ``text``, a rendering of marked texts: int64 [T]; ``first``: nothing comes before it."""
        ids: list[np.ndarray] = []
        for piece in text.split(CUT):
            if piece:
                ids.append(self._piece(piece, first=first))
                first = False
        return np.concatenate(ids) if ids else np.zeros(0, np.int64)

    def _marked(self, value: object, pattern: re.Pattern[str] | None, where: str, depth: int) -> object:
        if isinstance(value, str):
            return self._marked_text(str(value), pattern)
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, (np.number, np.bool_)):
            return value.item()
        if depth >= _DEPTH:
            raise DataError(where, f"is nested more than {_DEPTH} levels deep", "a flatter value")
        if isinstance(value, Mapping):
            items = ((self._marked(str(k), pattern, where, 0), v) for k, v in value.items())
            return {k: self._marked(v, pattern, f"{where}[{k!r}]", depth + 1) for k, v in items}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, pattern, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        raise DataError(where, f"got {_check.describe(value)}", "text, or a JSON value")

    def _marked_text(self, text: str, pattern: re.Pattern[str] | None) -> str:
        text = _FOREIGN.sub("\ufffd", text)
        if pattern is None:
            return text
        parts, start = [], 0
        while match := pattern.search(text, start):  # from inside the match on: the next may overlap it
            plain = text[start : match.start() + 1]
            parts.append(plain if len(match[0]) > 1 else plain[:-1] + "\ufffd")  # one character cannot be cut
            start = match.start() + 1
        text = CUT.join([*parts, text[start:]])
        body = text.rstrip()  # the template may trim, and then put something directly after it
        if body.endswith(self._edges):
            text = body + CUT + text[len(body) :]
        return text

    def _piece(self, text: str, *, first: bool) -> np.ndarray:
        ids = self._plain(text, special=True, first=first)
        if self._special is None:
            return ids
        matches = list(self._special.finditer(text))
        if np.isin(ids, self._special_ids).sum() == len(matches):
            return ids
        # The tokenizer saw a control token where the text has none, by normalising it. Only exact texts count.
        out, start = [], 0
        for match in matches:
            out.append(self._plain(text[start : match.start()], special=False, first=first and not start))
            token = self._ids[match[0]]
            out.append(np.zeros(0, np.int64) if token is None else np.array([token], np.int64))
            start = match.end()
        out.append(self._plain(text[start:], special=False, first=first and not start))
        return np.concatenate(out)

    def _plain(self, text: str, *, special: bool, first: bool) -> np.ndarray:
        if not text:
            return np.zeros(0, np.int64)
        if self._leads is None or first:
            return self._tokenizer.encode(text, special=special)
        ids = self._tokenizer.encode("\n" + text, special=special)  # what is put in front of a text stays there
        n = self._leads.size
        if ids.size >= n and (ids[:n] == self._leads).all():
            return ids[n:]
        return self._tokenizer.encode(text, special=special)

    def _single(self, text: str) -> int | None:
        ids = self._tokenizer.encode(text, special=True)
        return int(ids[0]) if ids.size == 1 else None


def _pattern(texts: list[str]) -> re.Pattern[str] | None:
    """Return a pattern for any of ``texts``, the longest first."""
    ordered = sorted(set(texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _special_by_search(tokenizer: Tokenizer) -> dict[str, bool]:
    """Return the texts of the ids that ``skip_special`` leaves out."""
    special = {}
    for i in range(tokenizer.vocab_size):
        if not tokenizer.decode([i], skip_special=True) and (text := tokenizer.decode([i], skip_special=False)):
            special[text] = True
    return special


def _adds_a_prefix(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the ids of a line break if the tokenizer puts something (a blank) in front of every text; else None."""
    line, word, both = (tokenizer.encode(text) for text in ("\n", "a", "\na"))
    return None if np.array_equal(np.concatenate([line, word]), both) else line


class TemplatePrompts:
    """Prompts by a chat template; without one the texts, one after the other."""

    def __init__(self, chat: Chat, tools: Sequence[Message]) -> None:
        self._chat = chat
        self._template = chat.tool_template if tools else chat.template
        self.renders_tools = self._template is not None and "tools" in self._template.names
        self._tools = chat.control.mark(list(tools), where="tools") if tools and self.renders_tools else None
        self.writes_calls = self._template is not None and self._template.call_form is not None
        self._rendered = -1, ""  # how many messages the last prompt has, and its text without prefill

    def turn(self, action: Action) -> Message:
        """Return the policy's turn; the prefill is the program's and keeps its control tokens."""
        prefill, mark = self._chat.prefill, self._chat.control.mark
        head = prefill if prefill and action.startswith(prefill) else ""
        return {"role": "assistant", "content": head + mark(str(action)[len(head) :], foreign=False)}

    def first(self, messages: Sequence[Message]) -> np.ndarray:
        """Render all messages and the head of the policy's turn: int64 [P]."""
        text = self._text(messages)
        self._check_written(messages, 0, text)
        self._rendered = len(messages), text
        return self._encode(text + self._chat.prefill, first=True)

    def answer(self, messages: Sequence[Message], following: Sequence[Message]) -> tuple[np.ndarray, np.ndarray, str]:
        """Return the last of ``messages``, the assistant's, as it is written after the prompt of those before it.

        ``following`` are the messages after it, whose head may be what ends it.

        Returns:
            int64 [k]: what the template puts before the content of an answer, an empty thought for one; int64 [n]: the
            rest, with the token that ends the turn; and the text of both without that token.

        Raises:
            DataError: the template does not write it there, or not all of it.
        """
        message, chat = messages[-1], self._chat
        if self._template is None:
            check_written(message, lambda name: False)
            before, written = "", str(message["content"])
        else:
            before, whole = self._text(messages[:-1]), self._text(messages, head=False)
            check_written(message, lambda name: self._text(without(messages, name), head=False) != whole)
            found = find_answer(message, before, self._text(messages[:-1], head=False), whole)
            written = found if isinstance(found, str) else whole[found:]
        said = without_prefill(written, message, chat.prefill)
        ends = [(chat.tokenizer.decode([token], skip_special=False), token) for token in chat.ends]
        at, token = min(((said.index(text), token) for text, token in ends if text and text in said), default=(-1, -1))
        if at >= 0:
            said, end = said[:at], np.array([token], np.int64)
        else:
            after = _after(self._text([*messages, *following]), before, said) if self._template and following else None
            end = np.array(chat.control.leading_ids(after or "")[:1], np.int64)
            end = end if np.isin(end, list(chat.ends)).any() else chat.end
        ids = self._encode(said)
        lead = size_of_lead(chat, ids, message)
        return ids[:lead], np.concatenate([ids[lead:], end]), said

    def following(
        self,
        prompt: np.ndarray,
        action: Action,
        messages: Sequence[Message],
        turn: int,
        *,
        keep: bool,
        said: str | None = None,
    ) -> np.ndarray:
        """Append the messages after the policy's ``turn`` to ``prompt`` and the tokens sampled for it.

        Where an earlier turn is written differently now, render all messages; ``keep`` forbids that as far as it can
        be forbidden. ``said`` is the turn as the template wrote it, where that is not its content.

        Returns:
            int64 [P].
        """
        text = self._text(messages if self._template else messages[turn + 1 :])
        if self._template is None:
            return np.concatenate([prompt, action.tokens, self._encode(text + self._chat.prefill)])
        known, before = self._rendered
        before = before if known == turn else self._text(messages[:turn])  # the prompt may have been given as tokens
        demonstrated, said = said is not None, messages[turn]["content"] if said is None else said
        rest = _after(text, before, said)
        if rest is None:
            if not keep:
                return self.first(messages)
            rest = self._after_placeholder(messages, turn)
        ids = self._encode(rest + self._chat.prefill)
        ended = action.tokens.size > 0 and int(action.tokens[-1]) in self._chat.ends
        if ended and ids.size and ids[0] in (action.tokens[-1], *self._closing(messages[: turn + 1], before, said)):
            ids = ids[1:]
        elif demonstrated and ended and np.isin(ids[:1], self._chat.control.special_ids).any() and not keep:
            return self.first(messages)  # within a conversation the template ends the turn otherwise
        self._check_written(messages, turn + 1, text)
        self._rendered = len(messages), text
        return np.concatenate([prompt, action.tokens, ids])

    def _closing(self, messages: Sequence[Message], before: str, said: str) -> np.ndarray:
        """Return int64: the control token with which the template closes the policy's turn, if it does so with one."""
        try:
            text = _after(self._text(messages, head=False), before, said)
        except DataError:
            text = None
        return np.intersect1d(self._encode(text or "")[:1], self._chat.control.special_ids)

    def _after_placeholder(self, messages: Sequence[Message], turn: int) -> str:
        """Return what the template writes after the policy's last turn, whatever it makes of the turn itself."""
        shown: Message = {"role": "assistant", "content": PLACEHOLDER}
        parts = self._text([*messages[:turn], shown, *messages[turn + 1 :]]).split(PLACEHOLDER)
        if len(parts) != 2:
            what = f"the template shows the policy's turn {len(parts) - 1} times"
            raise DataError("conversation", what, "once", "tokens cannot be appended to it")
        return parts[1]

    def _check_written(self, messages: Sequence[Message], first: int, text: str) -> None:
        """Raise DataError for a message, from ``first`` on, that the template leaves out: of a tool, for one."""
        lean = None
        for i in range(first, len(messages)) if self._template else ():
            role, content = messages[i]["role"], messages[i]["content"].strip()
            if role != "assistant" and content not in text:
                lean = _lean(text) if lean is None else lean
                if _lean(content) not in lean and _lean(_json(content)[1:-1]) not in lean:
                    what = f"is not written by the chat template, which leaves out the role {role!r}"
                    raise DataError(f"messages[{i}].content", what, "a template that writes it")

    def _text(self, messages: Sequence[Message], *, head: bool = True) -> str:
        if self._template is not None:
            messages = in_form(messages, self._template.call_form or (False, False), self._template.thoughts)
            return self._template.render(messages, head=head, **{**self._chat.variables, "tools": self._tools})
        texts = [message.get("content") for message in messages]
        if not all(isinstance(text, str) for text in texts):
            what = "a message has no text, and the model has no chat template"
            raise DataError("observation", what, "messages with text")
        return "".join(map(str, texts))

    def _encode(self, text: str, *, first: bool = False) -> np.ndarray:
        return self._chat.control.encode(text, first=first)


def check_written(message: Message, is_written: Callable[[str], bool]) -> None:
    """Raise DataError where tool calls or thoughts of an answer would be lost."""
    for name in ("tool_calls", "reasoning_content"):
        if name in message and not is_written(name):
            why = "or write them into content as text"
            raise DataError(name, "is not written by the model's chat template", "a template that writes it", why)


def find_answer(message: Message, before: str, bare: str, whole: str) -> int | str:
    """Return where an answer begins in ``whole``; if it is not there, the rest of its content after the prompt.

    Args:
        message: the answer.
        before: the prompt, with the head of the turn.
        bare: the same without it.
        whole: the prompt and the answer, as the template writes them; it may write the history otherwise now.

    Raises:
        DataError: the head holds more than the template writes before this answer.
    """
    content, head = str(message["content"]), before.removeprefix(bare) if before.startswith(bare) else ""
    start = len(before) if whole.startswith(before) else -1
    for written in (head, head.rstrip()):
        if start < 0 and written and written in whole:
            start = whole.rfind(written) + len(written)
    if start < 0 and not head and content.strip() in whole:  # the history is written otherwise, and turns have no head
        start = len(whole[: whole.rfind(content.strip())].rstrip())
    rest, structured = whole[max(start, 0) :], {"tool_calls", "reasoning_content"} & message.keys()
    if start >= 0 and (_holds(rest, content) or (_holds(head + rest, content) and not _holds(head, content))):
        return start
    tail = next(head[i:] for i in range(len(head), -1, -1) if head[:i] in whole)  # ``<think>``, for one: not in whole
    if structured or not content.lstrip().startswith(tail.strip()):
        name = "content" if start >= 0 else min(structured, default="content")
        what = f"is written otherwise, or not at all, after the prompt, which ends with {_check.describe(head)}"
        why = "thinking, template and prefill of the chat change the prompt"
        raise DataError(name, what, "an answer that continues the prompt", why)
    if not tail.strip():
        return content
    content = content.lstrip()
    return content[len(tail) if content.startswith(tail) else len(tail.strip()) :]


def without_prefill(written: str, message: Message, prefill: str) -> str:
    """Return an answer, as it is written, after the prefill, with which the prompt ends. Raises DataError."""
    cuts = re.compile("".join(re.escape(character) + f"{CUT}?" for character in prefill))
    for text in (written, str(message["content"])):
        if begins := cuts.match(text):
            return text[begins.end() :]
    raise DataError("content", f"does not begin with Chat.prefill, {prefill!r}", "an answer that does")


def size_of_lead(chat: Chat, ids: np.ndarray, message: Message) -> int:
    """Return how many of an answer's tokens the template puts before its content; 0 if it has more than content."""
    content = message["content"].replace(CUT, "").strip()
    if not content or {"tool_calls", "reasoning_content"} & message.keys():
        return 0
    at = chat.tokenizer.decode(ids, skip_special=False).rfind(content)
    sizes = (len(chat.tokenizer.decode(ids[:k], skip_special=False)) for k in range(1, ids.size + 1))
    return sum(1 for _ in itertools.takewhile(lambda size: size <= at, sizes))


def _lean(text: str) -> str:
    """Return a text without white space and separators."""
    return "".join(text.replace(CUT, "").split())


def _holds(text: str, content: str) -> bool:
    """Return whether all of ``content`` is in ``text``, white space aside."""
    return _lean(content) in _lean(text)


def without(messages: Sequence[Message], name: str) -> list[Message]:
    """Return the messages with the last one's field ``name`` left out."""
    return [*messages[:-1], {key: value for key, value in messages[-1].items() if key != name}]


def _after(text: str, before: str, said: str) -> str | None:
    r"""Return what is in ``text`` after ``before`` and ``said``; None if it does not begin so, white space aside.

    >>> _after("user: Hi\nbot: Yes.\n", "user: Hi\nbot: ", " Yes. "), _after("bot: No.", "bot: ", "Yes.")
    ('\n', None)
    """
    if not text.startswith(before):
        return None
    if text.startswith(said, len(before)):
        return text[len(before) + len(said) :]
    words, at = said.split(), len(before)
    for word in words:
        while text[at : at + 1].isspace():
            at += 1
        if not text.startswith(word, at):
            return None
        at += len(word)
    space = said[len(said.rstrip()) :]  # was sampled, so it is not to come twice
    return text[at + len(space) :] if text.startswith(space, at) else text[at:]
