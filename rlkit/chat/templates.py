"""Prompts written with the model's chat template, and text that cannot become control tokens.

A chat template writes control tokens (``<|im_end|>``) as text, and so can an environment, a user or a tool. Both come
out of the template as one string, so the difference has to travel inside it: contents are marked before they are
rendered. A marked string has an invisible separator after the first character of each control token's text; it ends a
piece of text when the rendering is encoded, and control tokens do not grow across pieces. Text without such strings is
not changed at all, so its tokens are those of the plain rendering.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike

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
        environment = _make_environment()
        try:
            self._compiled = environment.from_string(text)
            self.names = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(text)))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"template: line {error.lineno}: {error.message}; expected a Jinja template") from error
        self.text = text
        self.written_roles: set[str] = set()  # of messages that are known not to be left out
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
            return self._compiled.render(names, messages=list(messages), add_generation_prompt=head)
        except (*self._failures, RecursionError, MemoryError) as error:
            what = f"the chat template refuses messages with the roles {_check.roles(messages)}"
            raise DataError(f"{what}: {str(error) or type(error).__name__}") from error

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
        histories = [(asked, False), (answered, True)]
        other = {"type": "function", "function": {"name": "other", "description": "", "parameters": {"type": "object"}}}
        forms = [(as_text, null) for null in (False, True) for as_text in (False, True)]
        for tools, form in itertools.product((None, [other]), forms):
            with contextlib.suppress(DataError):
                texts = [self.render(adapt_messages(said, form), head=head, tools=tools) for said, head in histories]
                if all("probe_name" in text and "probe_key" in text for text in texts):
                    return form
        return None

    @functools.cached_property
    def thoughts(self) -> str:
        """The name under which the template reads reasoning."""
        names = ("reasoning_content", "thinking", "reasoning")
        return next((x for x in names if re.search(rf"(?:\.|['\"]){x}\b", self.text)), names[0])


def adapt_messages(
    messages: Sequence[Message], form: tuple[bool, bool], thoughts: str = "reasoning_content"
) -> list[Message]:
    """Return messages in the form that a template reads: see ``Template.call_form`` and ``Template.thoughts``."""
    as_text, null = form
    ready: list[Message] = []
    for message in messages:
        fields = {thoughts if name == "reasoning_content" else name: value for name, value in message.items()}
        if null and "tool_calls" in fields:
            fields["content"] = fields["content"] or None
        if as_text and "tool_calls" in fields:
            functions = [(call, call["function"]) for call in fields["tool_calls"]]
            calls = [{**call, "function": {**f, "arguments": _json(f["arguments"])}} for call, f in functions]
            fields["tool_calls"] = calls
        ready.append(fields)
    return ready


def _make_environment() -> Environment:
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

    extensions = [Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": refuse, "strftime_now": dt.datetime.now().astimezone().strftime}
    return environment


def _json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """Write plain JSON as transformers does; Jinja's own filter would write escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


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

    Attributes:
        special_ids: int64 [K], sorted: the ids of the special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer = tokenizer
        added: Mapping[str, bool] | None = getattr(tokenizer, "added_tokens", None)
        if added is None:
            hidden = [i for i in range(tokenizer.vocab_size) if not tokenizer.decode([i], skip_special=True)]
            added = {tokenizer.decode([i], skip_special=False): True for i in hidden}
        special = [text for text, is_special in added.items() if is_special and text.strip()]
        written = [text for text in added if text in (template or "") and len(text.strip()) > 2]
        self._special = _match_any(special)
        self._all = _match_any([*special, *written])
        self._edges = tuple({text[:i] for text in (*special, *written) for i in range(1, len(text))})
        self._ids = {text: self._find_id(text) for text in special}
        self.special_ids = np.sort(np.array([i for ids in self._ids.values() for i in ids], np.int64))
        line, word, both = (tokenizer.encode(text) for text in ("\n", "a", "\na"))
        self._leads = line if [*line, *word] != [*both] else None  # of one that puts a blank in front of every text

    def leading_ids(self, text: str) -> list[int]:
        """Return the ids of the control tokens that ``text`` begins with, white space aside."""
        ids: list[int] = []
        while self._all and (match := self._all.match(text := text.lstrip())):
            ids += self._find_id(match[0])
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
        return cast("_Json", self._mark(value, self._all if foreign else self._special, where, 0))

    def encode(self, text: str, *, first: bool = True) -> np.ndarray:
        """Encode ``text``, a rendering of marked texts: int64 [T]; ``first``: nothing comes before it."""
        pieces = [piece for piece in text.split(CUT) if piece]
        ids = [self._encode_piece(piece, first=first and i == 0) for i, piece in enumerate(pieces)]
        return np.concatenate([np.zeros(0, np.int64), *ids])

    def _mark(self, value: object, pattern: re.Pattern[str] | None, where: str, depth: int) -> object:
        if isinstance(value, str):
            return self._mark_text(str(value), pattern)
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, (np.number, np.bool_)):
            return value.item()
        if depth >= _DEPTH:
            raise DataError(where, f"is nested more than {_DEPTH} levels deep", "a flatter value")
        if isinstance(value, Mapping):
            items = ((self._mark(str(k), pattern, where, 0), v) for k, v in value.items())
            return {k: self._mark(v, pattern, f"{where}[{k!r}]", depth + 1) for k, v in items}
        if isinstance(value, (list, tuple)):
            return [self._mark(item, pattern, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        raise DataError(where, f"got {_check.describe(value)}", "text, or a JSON value")

    def _mark_text(self, text: str, pattern: re.Pattern[str] | None) -> str:
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

    def _encode_piece(self, text: str, *, first: bool) -> np.ndarray:
        ids = self._encode_plain(text, special=True, first=first)
        if self._special is None or np.isin(ids, self.special_ids).sum() == len(self._special.findall(text)):
            return ids
        # The tokenizer saw a control token where the text has none, by normalising it. Only exact texts count.
        out: list[ArrayLike] = []
        for i, part in enumerate(self._special.split(text)):  # every second one is a control token
            out.append(self._ids[part] if i % 2 else self._encode_plain(part, special=False, first=first and i == 0))
        return np.concatenate(out).astype(np.int64)

    def _encode_plain(self, text: str, *, special: bool, first: bool) -> np.ndarray:
        if text and self._leads is not None and not first:
            ids = self._tokenizer.encode("\n" + text, special=special)  # what is put in front of a text stays there
            n = self._leads.size
            if np.array_equal(ids[:n], self._leads):
                return ids[n:]
        return self._tokenizer.encode(text, special=special) if text else np.zeros(0, np.int64)

    def _find_id(self, text: str) -> list[int]:
        """Return the id of a text that is one token."""
        ids: list[int] = self._tokenizer.encode(text, special=True).tolist()
        return ids if len(ids) == 1 else []


def _match_any(texts: list[str]) -> re.Pattern[str] | None:
    """Return a pattern for any of ``texts``, the longest first, as a group."""
    ordered = sorted(set(texts), key=lambda text: (-len(text), text))
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


class TemplatePrompts:
    """Prompts of marked messages by a chat template; without one the texts, one after the other.

    ``rlkit.chat._rendering.RendererPrompts`` has the same methods over a renderer.
    """

    def __init__(self, chat: Chat, tools: Sequence[Message]) -> None:
        self._chat = chat
        self._template = chat.tool_template if tools else chat.template
        self.renders_tools = self._template is not None and "tools" in self._template.names
        self._tools = chat.control.mark(list(tools), where="tools") if tools and self.renders_tools else None
        self.writes_calls = self._template is not None and self._template.call_form is not None
        self._rendered = -1, ""  # how many messages the last prompt has, and its text without prefill
        self._answer: Message = {}  # the last that was given and not sampled,
        self._written = ""  # and how the template wrote it

    def write_turn(self, action: Action) -> Message:
        """Return the policy's turn; the prefill is the program's and keeps its control tokens."""
        prefill, mark = self._chat.prefill, self._chat.control.mark
        head = prefill if prefill and action.startswith(prefill) else ""
        return {"role": "assistant", "content": head + mark(str(action)[len(head) :], foreign=False)}

    def write(self, messages: Sequence[Message], *, head: bool = False) -> str:
        """Return messages as text; ``head``: with the head of the policy's turn, without the prefill."""
        if self._template is not None:
            messages = adapt_messages(messages, self._template.call_form or (False, False), self._template.thoughts)
            return self._template.render(messages, head=head, **{**self._chat.switched, "tools": self._tools})
        return "".join(message["content"] for message in messages)

    def first_prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Render all messages and the head of the policy's turn: int64 [P]."""
        text = self.write(messages, head=True)
        self._check_written(messages, 0, text)
        self._rendered = len(messages), text
        return self._chat.control.encode(text + self._chat.prefill)

    def write_answer(self, messages: Sequence[Message], following: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Return the last of ``messages``, the assistant's, as it is written after the prompt of those before it.

        ``following`` are the messages after it, whose head may be what ends it.

        Returns:
            int64 [k]: what the template puts before the content of an answer, an empty thought for one; int64 [n]: the
            rest, with the token that ends the turn.

        Raises:
            DataError: the template does not write it there, or not all of it.
        """
        chat, message = self._chat, messages[-1]
        _, written = find_answer(self.write, messages, message)
        said = without_prefill(written, message, chat.prefill)
        ends = [(chat.tokenizer.decode([token], skip_special=False), token) for token in chat.ends]
        at, token = min(((said.index(text), token) for text, token in ends if text and text in said), default=(-1, -1))
        if at >= 0:
            said, end = said[:at], [token]
        else:
            before = self.write(messages[:-1], head=True)
            after = text_after_turn(self.write([*messages, *following], head=True), before, said) if following else None
            end = chat.control.leading_ids(after or "")[:1]
        self._answer, self._written = message, said
        return end_answer(chat, message, chat.control.encode(said, first=False), end)

    def next_prompt(
        self, prompt: np.ndarray, action: Action, messages: Sequence[Message], turn: int, *, keep: bool
    ) -> np.ndarray:
        """Append the messages after the policy's ``turn`` to ``prompt`` and the tokens sampled for it.

        Where an earlier turn is written differently now, render all messages; ``keep`` forbids that as far as it can
        be forbidden.

        Returns:
            int64 [P].
        """
        if self._template is None:
            new = self.write(messages[turn + 1 :]) + self._chat.prefill
            return np.concatenate([prompt, action.tokens, self._chat.control.encode(new, first=False)])
        text = self.write(messages, head=True)
        known, before = self._rendered
        if known != turn:  # the prompt may have been given as tokens
            before = self.write(messages[:turn], head=True)
        given = messages[turn] is self._answer
        said = self._written if given else messages[turn]["content"]
        rest = text_after_turn(text, before, said)
        if rest is None:
            if not keep:
                return self.first_prompt(messages)
            rest = self._after_placeholder(messages, turn)
        ids = self._chat.control.encode(rest + self._chat.prefill, first=False)
        ended = action.tokens.size > 0 and int(action.tokens[-1]) in self._chat.ends
        if (
            ended
            and ids.size
            and ids[0] in (action.tokens[-1], *self._find_closing(messages[: turn + 1], before, said))
        ):
            ids = ids[1:]
        elif given and ended and np.isin(ids[:1], self._chat.control.special_ids).any() and not keep:
            return self.first_prompt(messages)  # within a conversation the template ends the turn otherwise
        self._check_written(messages, turn + 1, text)
        self._rendered = len(messages), text
        return np.concatenate([prompt, action.tokens, ids])

    def _find_closing(self, messages: Sequence[Message], before: str, said: str) -> np.ndarray:
        """Return int64: the control token with which the template closes the policy's turn, if it does so with one."""
        try:
            text = text_after_turn(self.write(messages), before, said)
        except DataError:
            return np.zeros(0, np.int64)
        ids = self._chat.control.encode(text or "", first=False)
        return np.intersect1d(ids[:1], self._chat.control.special_ids)

    def _after_placeholder(self, messages: Sequence[Message], turn: int) -> str:
        """Return what the template writes after the policy's last turn, whatever it makes of the turn itself."""
        shown: Message = {"role": "assistant", "content": PLACEHOLDER}
        parts = self.write([*messages[:turn], shown, *messages[turn + 1 :]], head=True).split(PLACEHOLDER)
        if len(parts) != 2:
            what = f"the template shows the policy's turn {len(parts) - 1} times"
            raise DataError("conversation", what, "once", "tokens cannot be appended to it")
        return parts[1]

    def _check_written(self, messages: Sequence[Message], first: int, text: str) -> None:
        """Raise DataError for a message, from ``first`` on, that the template leaves out: of a tool, for one."""
        lean = ""
        for i in range(first, len(messages)) if self._template else ():
            role, content = messages[i]["role"], messages[i]["content"].strip()
            if role == "assistant":
                continue
            if written := self._writes_role(messages, i):
                lean = _lean(text) if content not in text and not lean else lean
                written = content in text or _lean(content) in lean or _lean(_json(content)[1:-1]) in lean
            if not written:
                what = f"is not written by the chat template, which leaves out the role {role!r}"
                raise DataError(f"messages[{i}].content", what, "a template that writes it")

    def _writes_role(self, messages: Sequence[Message], i: int) -> bool:
        """Return whether the template writes message ``i``: a short text may also stand elsewhere in a prompt."""
        roles: set[str] = set() if self._template is None else self._template.written_roles
        if messages[i]["role"] not in roles:
            shown = {**messages[i], "content": PLACEHOLDER}
            if PLACEHOLDER not in self.write([*messages[:i], shown, *messages[i + 1 :]], head=True):
                return False
            roles.add(messages[i]["role"])
        return True


def find_answer(write: Callable[..., str], messages: Sequence[Message], message: Message) -> tuple[int, str]:
    """Return where the last of ``messages``, an answer, begins in the text of all of them, and that text from there.

    If it is not there (-1), the text is the rest of its content after the prompt.

    Args:
        write: the method of the prompts.
        messages: the history, which may be written otherwise before this answer than in the prompt, and the answer.
        message: the answer, with marks as ``write`` has them.

    Raises:
        DataError: its tool calls or thoughts would be lost, or the head of the turn holds more than the template writes
            before this answer.
    """
    before, bare, whole = write(messages[:-1], head=True), write(messages[:-1]), write(messages)
    for name in ("tool_calls", "reasoning_content"):
        without = {key: value for key, value in messages[-1].items() if key != name}
        if name in message and write([*messages[:-1], without]) == whole:
            why = "or write them into content as text"
            raise DataError(name, "is not written by the model's chat template", "a template that writes it", why)
    content, head = str(message["content"]), before.removeprefix(bare) if before.startswith(bare) else ""
    start = len(before) if whole.startswith(before) else -1
    for written in (head, head.rstrip()):
        if start < 0 and written and written in whole:
            start = whole.rfind(written) + len(written)
    if start < 0 and not head and content.strip() in whole:  # the history is written otherwise, and turns have no head
        start = len(whole[: whole.rfind(content.strip())].rstrip())
    rest, structured = whole[max(start, 0) :], {"tool_calls", "reasoning_content"} & message.keys()
    lean = _lean(content)
    if start >= 0 and (lean in _lean(rest) or (lean in _lean(head + rest) and lean not in _lean(head))):
        return start, rest
    tail = next(head[i:] for i in range(len(head), -1, -1) if head[:i] in whole)  # ``<think>``, for one: not in whole
    if structured or not content.lstrip().startswith(tail.strip()):
        name = "content" if start >= 0 else min(structured, default="content")
        what = f"is written otherwise, or not at all, after the prompt, which ends with {_check.describe(head)}"
        why = "thinking, template and prefill of the chat change the prompt"
        raise DataError(name, what, "an answer that continues the prompt", why)
    if tail.strip():
        content = content.lstrip()
        content = content[len(tail) if content.startswith(tail) else len(tail.strip()) :]
    return -1, content


def without_prefill(written: str, message: Message, prefill: str) -> str:
    """Return an answer, as it is written, after the prefill, with which the prompt ends. Raises DataError."""
    cuts = re.compile("".join(re.escape(character) + f"{CUT}?" for character in prefill))
    for text in (written, str(message["content"])):
        if begins := cuts.match(text):
            return text[begins.end() :]
    raise DataError("content", f"does not begin with Chat.prefill, {prefill!r}", "an answer that does")


def end_answer(
    chat: Chat, message: Message, ids: np.ndarray, end: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the template puts before an answer's content, and the rest with ``end``, if that ends turns.

    The first is empty for an answer with more than content.
    """
    end = end if len(end) and chat.ends.issuperset(end) else chat.end
    content, lead = message["content"].replace(CUT, "").strip(), 0
    if content and not {"tool_calls", "reasoning_content"} & message.keys():
        at = chat.tokenizer.decode(ids, skip_special=False).rfind(content)
        sizes = (len(chat.tokenizer.decode(ids[:k], skip_special=False)) for k in range(1, ids.size + 1))
        lead = sum(1 for _ in itertools.takewhile(lambda size: size <= at, sizes))
    return ids[:lead], np.concatenate([ids[lead:], np.array(end, np.int64)])


def _lean(text: str) -> str:
    """Return a text without white space and separators."""
    return "".join(text.replace(CUT, "").split())


def text_after_turn(text: str, before: str, said: str) -> str | None:
    r"""Return what is in ``text`` after ``before`` and ``said``; None if it does not begin so, white space aside.

    >>> text_after_turn("user: Hi\nbot: Yes.\n", "user: Hi\nbot: ", " Yes. ")
    '\n'
    >>> text_after_turn("bot: No.", "bot: ", "Yes.")
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
