"""How a policy is talked to: one setting for all conversations with it."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._interaction import Action, Message, Observation
from rlkit._runtime import warn
from rlkit.backends.protocol import Tokenizer
from rlkit.chat._rendering import RendererPrompts, make_renderer
from rlkit.chat.messages import is_list, read_messages, read_text
from rlkit.chat.templates import ControlText, Template, TemplatePrompts
from rlkit.errors import ConfigError, DataError
from rlkit.tools.responses import response_reader
from rlkit.tools.types import Malformed, Parsed
from rlkit.types import SamplingParams

__all__ = ["Chat", "Conversation"]

_warned: set[str] = set()  # of end tokens


class Conversation:
    """A conversation so far, as tokens and as messages. Made by ``Chat.start``.

    The next prompt is the previous prompt, the sampled tokens, what closes the policy's turn if the policy did not
    close it itself, the new messages, and the head of the next turn. Only the new part is tokenised.

    Attributes:
        prompt: int64 [P], the sampler's next prompt.
        extends: whether ``prompt`` begins with the previous prompt and the tokens sampled for it; False at first, and
            after an earlier turn was rewritten (see ``Chat.history``).
        messages: everything said, as dicts with ``role`` and ``content``, for logs.
    """

    def __init__(self, chat: Chat, observation: Observation, tools: Sequence[Message] = ()) -> None:
        good = isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)
        _check.require(good, "tools", tools, "a sequence of function schemas", error=DataError)
        self._chat = chat
        self.extends = False
        self.messages: list[Message] = []
        self._safe: list[Message] = []  # the same, safe to render
        self._schemas = tools
        self._prompts = chat.make_prompts(tools)
        self._as_tokens = False  # parts of the prompt never were text
        if _holds_tokens(observation):
            self.prompt = _check.frozen(self._add_tokens(observation))
            return
        self._begin(_read_observation(observation))
        self.prompt = _check.frozen(self._prompts.first_prompt(self._safe))

    def add(self, action: Action, observation: Observation | None) -> None:
        """Append what was sampled for ``prompt``, as it was sampled, and what the environment answered.

        Args:
            action: from ``Chat.action``.
            observation: text, messages or token ids; None ends the conversation, and ``prompt`` stays.

        Raises:
            DataError: an observation of another form, or messages that cannot be rendered. Nothing is changed.
        """
        _check.require(isinstance(action, Action), "action", action, "an Action", "from Chat.action", error=DataError)
        with self._undo_on_error():
            self._add(action, observation)

    def demonstrate(self, message: Message, observation: Observation | None = None, *, lead: bool = True) -> np.ndarray:
        """Append a given answer in place of a sampled one, and what the environment answered.

        Args:
            message: the assistant's; its thoughts and tool calls are written as the chat template writes them.
            observation: as in ``add``.
            lead: whether what the template puts before the content, an empty thought for one, belongs to the answer;
                otherwise it is added to ``prompt``.

        Returns:
            int64 [n]: the answer's tokens after ``prompt``, the last of them the one at which a sampler would stop.

        Raises:
            DataError: a message of another role, or one that the template does not write after this prompt; as in
                ``add``. Nothing is changed.

        >>> import rlkit
        >>> tokenizer = rlkit.connect("toy").tokenizer
        >>> conversation = Chat(tokenizer).start("1 + 1?")
        >>> tokens = conversation.demonstrate({"role": "assistant", "content": "2"}, "And 2 + 2?")
        >>> tokenizer.decode(tokens, skip_special=False)
        '2<|im_end|>'
        """
        (message,) = read_messages([message])
        if message["role"] != "assistant":
            raise DataError("message.role", f"is {message['role']!r}", "'assistant'")
        mark = self._chat.control.mark
        marked = mark(self._write_calls(message), foreign=False)
        following = [] if observation is None or _holds_tokens(observation) else _read_observation(observation)
        try:
            before, tokens = self._prompts.write_answer([*self._safe, marked], [mark(each) for each in following])
        except DataError as error:
            raise DataError(f"messages[{len(self.messages)}].{error}") from error
        with self._undo_on_error():
            if lead:
                tokens = np.concatenate([before, tokens])
            else:
                self.prompt = _check.frozen(np.concatenate([self.prompt, before]))
            self._add(Action(message["content"], tokens=tokens), observation, (message, marked))
        return _check.frozen(tokens)

    def begin_turn(self, text: str) -> None:
        """Make the policy's next turn begin with ``text``, which joins the prompt and the turn, as a prefill does.

        The action to ``add`` then is one of a chat with that prefill after its own.
        """
        self.prompt = _check.frozen(np.concatenate([self.prompt, self._chat.control.encode(text, first=False)]))

    def fork(self) -> Conversation:
        """Return another conversation that begins with all of this one; later turns of one are not in the other."""
        other = copy.copy(self)
        vars(other).update(messages=list(self.messages), _safe=list(self._safe), _prompts=copy.copy(self._prompts))
        return other

    @contextlib.contextmanager
    def _undo_on_error(self) -> Iterator[None]:
        size, prompt, as_tokens = len(self.messages), self.prompt, self._as_tokens
        try:
            yield
        except Exception:
            del self.messages[size:], self._safe[size:]
            self.prompt, self._as_tokens = prompt, as_tokens
            raise

    def _add(
        self, action: Action, observation: Observation | None, given: tuple[Message, Message] | None = None
    ) -> None:
        """Add a turn, sampled or ``given``: the message, and the same safe to render."""
        if self._chat.history == "none":
            self._begin_anew(action, observation)
            return
        turn = len(self._safe)
        message, safe = given or ({"role": "assistant", "content": str(action)}, self._prompts.write_turn(action))
        self.messages.append(message)
        self._safe.append(safe)
        if observation is None:
            return
        before = np.concatenate([self.prompt, action.tokens])
        if _holds_tokens(observation):
            prompt = np.concatenate([before, self._add_tokens(observation)])
        else:
            self._add_messages(_read_observation(observation))
            keep = self._as_tokens or self._chat.history == "append"
            prompt = self._prompts.next_prompt(self.prompt, action, self._safe, turn, keep=keep)
        extends = np.array_equal(prompt[: before.size], before)
        if self._as_tokens and not extends:
            what = "messages cannot be appended to these tokens, and token ids cannot be rendered again"
            raise DataError("conversation", what, "text or messages from the start")
        self.prompt, self.extends = _check.frozen(prompt), extends

    def _begin_anew(self, action: Action, observation: Observation | None) -> None:
        """Make the next prompt what another conversation would begin with; the log goes on."""
        said: list[Message] = [{"role": "assistant", "content": str(action)}]
        if observation is not None:
            fresh = Conversation(self._chat, observation, self._schemas)
            said += [message for message in fresh.messages if message["role"] != "system"]
            self.prompt, self.extends = fresh.prompt, False
        self.messages += said

    def _begin(self, messages: list[Message]) -> None:
        """Put what the program, the tools and the environment want in the system prompt into one message."""
        chat, mark = self._chat, self._chat.control.mark
        parts = [] if chat.system is None else [(chat.system, mark(chat.system, foreign=False))]
        if self._schemas and not self._prompts.renders_tools:
            from rlkit.tools import describe

            described = describe(self._schemas, chat.tool_format)
            parts.append((described, mark(described)))
        if parts and messages and messages[0]["role"] == "system":
            text = messages.pop(0)["content"]
            parts.append((text, mark(text)))
        if parts:
            end = "\n\n" if messages and chat.template is None and chat.renderer is None else ""
            self.messages.append({"role": "system", "content": "\n\n".join(plain for plain, _ in parts)})
            self._safe.append({"role": "system", "content": "\n\n".join(marked for _, marked in parts) + end})
        self._add_messages(messages)

    def _add_messages(self, messages: list[Message]) -> None:
        """Add messages of the environment."""
        mark, ready = self._chat.control.mark, [self._write_calls(message) for message in messages]
        safe = [mark(m, foreign=m["role"] != "assistant", where=f"messages[{i}]") for i, m in enumerate(ready)]
        self.messages += messages
        self._safe += safe

    def _write_calls(self, message: Message) -> Message:
        """Return the message; where the template does not write tool calls, with these in its content."""
        if "tool_calls" not in message or self._prompts.writes_calls:
            return message
        if self._chat.tool_format != "hermes":
            what = f"are not written by the chat template, and not in the format {self._chat.tool_format!r}"
            raise DataError("tool_calls", what, "a template that writes them", "or write them into content as text")
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
        texts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**rest, "content": "\n".join(filter(None, texts))}

    def _add_tokens(self, observation: np.ndarray) -> np.ndarray:
        """Return int64: what the environment gave as tokens, and the prefill; the log has its text."""
        chat = self._chat
        ids = _check.token_ids("observation", observation, vocab_size=chat.tokenizer.vocab_size)
        text = chat.tokenizer.decode(ids, skip_special=False)
        self.messages.append({"role": "user", "content": text})
        self._safe.append({"role": "user", "content": chat.control.mark(text)})
        self._as_tokens = True
        return np.concatenate([ids, chat.control.encode(chat.prefill, first=False)])


def _holds_tokens(observation: object) -> TypeGuard[np.ndarray]:
    """Return whether an observation is token ids; an array of objects, as pandas reads them, is messages."""
    return isinstance(observation, np.ndarray) and observation.dtype != object


def _read_templates(tokenizer: Tokenizer, template: str | None) -> tuple[Template | None, Template | None]:
    """Return the chat template, and the one for conversations with tools."""
    names = dict(getattr(tokenizer, "named_tokens", {}))
    text = tokenizer.chat_template if template is None else template
    if isinstance(text, Mapping):  # some models have one for tools besides the usual one
        usual = Template(text.get("default", ""), names)
        return usual, Template(text["tool_use"], names) if "tool_use" in text else usual
    only = None if text is None else Template(text, names)
    return only, only


def _read_observation(observation: object) -> list[Message]:
    """Return the observation as messages."""
    if isinstance(observation, str):
        return [{"role": "user", "content": read_text(observation, "observation")}]
    if not is_list(observation):
        expected = "text, a list of messages, or an array of token ids"
        raise DataError("observation", f"got {_check.describe(observation)}", expected)
    return read_messages(observation, "observation")


def _read_variables(given: Mapping[str, object] | None) -> dict[str, object]:
    return dict(given or {})


@attrs.define(eq=False, repr=False, slots=False)
class Chat:
    """Turn observations into prompts, and sampled tokens into actions.

    Args:
        tokenizer: the policy's.
        system: a system prompt of the program's own. An environment's system message is put after it.
        template: the text of a chat template instead of the model's. A model that has none gets its texts one after
            the other, and nothing between them.
        thinking: switches thinking on or off in templates that know ``enable_thinking`` or ``thinking``; None leaves
            it to the template.
        prefill: how each of the policy's turns begins; control tokens written in it are control tokens. It belongs to
            the prompt, is not trained, and is part of the action's text.
        history: what happens when a template would now write an earlier turn differently from what was sampled (Qwen3
            leaves earlier thinking out). "template" renders everything anew, as in use after training, and the turn
            begins a new datum; "append" keeps all tokens as they are, so that an episode is one datum. "none" forgets:
            every observation is its own prompt, for environments that say each time all that is to be known.
        tool_format: how tools are described to a model whose template does not render them; a name in
            ``rlkit.tools.formats``.
        variables: other variables of the template.
        renderer: what writes and reads the model's turns and tool calls in place of the chat template: a family or a
            model by its name in the package ``renderers`` (``"qwen3"``, ``"Qwen/Qwen3-8B"``), or the import path of a
            renderer's class (``"my_module:MyRenderer"``, as ``renderers.custom`` reads it). None: turns are written by
            the chat template, and read by the tokenizer's response template where it has one (transformers'
            ``parse_response``) and ``template`` is None, then by the environment's tool format.

    Attributes:
        ends: the ids that end a turn of the policy: the model's end tokens, the renderer's, and the control token that
            the template writes after a turn. If the last is not among the others, ``Chat`` warns once.

    Raises:
        ConfigError: an argument of the wrong type, a template that is not valid or lacks the thinking switch, or a
            renderer that does not fit the tokenizer.

    >>> import rlkit
    >>> tokenizer = rlkit.connect("toy").tokenizer
    >>> chat = Chat(tokenizer, system="Be brief.", prefill="= ")
    >>> conversation = chat.start("1 + 1?")
    >>> print(tokenizer.decode(conversation.prompt, skip_special=False))
    <|im_start|>system
    Be brief.<|im_end|>
    <|im_start|>user
    1 + 1?<|im_end|>
    <|im_start|>assistant
    =
    >>> action = chat.action(tokenizer.encode("2<|im_end|>", special=True))  # what the sampler gave
    >>> action
    '= 2'
    >>> conversation.add(action, "And 2 + 2?")
    >>> conversation.extends
    True
    """

    tokenizer: Tokenizer
    system: str | None = attrs.field(default=None, kw_only=True)
    _template: str | None = attrs.field(default=None, kw_only=True)  # as given; ``template`` is what is used
    thinking: bool | None = attrs.field(default=None, kw_only=True)
    prefill: str = attrs.field(default="", kw_only=True)
    history: Literal["template", "append", "none"] = attrs.field(default="template", kw_only=True)
    tool_format: str = attrs.field(default="hermes", kw_only=True)
    variables: dict[str, object] = attrs.field(default=None, kw_only=True, converter=_read_variables)
    _renderer: str | None = attrs.field(default=None, kw_only=True)  # as given, too

    def __attrs_post_init__(self) -> None:
        system, prefill = self.system, self.prefill
        _check.require(system is None or isinstance(system, str), "Chat.system", system, "a string or None")
        _check.require(isinstance(prefill, str), "Chat.prefill", prefill, "a string")
        _check.choice("Chat.history", self.history, ("template", "append", "none"))
        if self.tool_format != "hermes":
            from rlkit.tools import describe

            describe((), self.tool_format)
        _check.require_protocol("Chat(tokenizer)", self.tokenizer, Tokenizer, "policy.tokenizer")
        self.template, self.tool_template = _read_templates(self.tokenizer, self._template)
        switch = {} if self.thinking is None else {"enable_thinking": _check.flag("Chat.thinking", self.thinking)}
        name, given = self._renderer, self._template
        if name is not None and given is not None:
            raise ConfigError("Chat.renderer", "got a template, too", "one of them", "both say how turns are written")
        self.renderer = None if name is None else make_renderer(name, self.tokenizer, {**self.variables, **switch})
        # A response template is made for the model's own chat template.
        self._reader = response_reader(self.tokenizer) if name is None and given is None else None
        self.switched = dict(self.variables)  # as the template reads them
        if self.renderer is not None:
            self.control, known = self.renderer.control, self.renderer.ends.union(self.tokenizer.eos_ids)
        else:
            self.switched |= self._find_switches()
            texts = "".join(t.text for t in (self.template, self.tool_template) if t)
            self.control, known = ControlText(self.tokenizer, texts), frozenset(self.tokenizer.eos_ids)
        self._closing = self._find_closing(known)
        self.ends = known if self._closing is None else known | {self._closing}

    @functools.cached_property
    def end(self) -> np.ndarray:
        """Return int64 [1], the token to train after a turn: the one that the template writes; [0] if it has none.

        If the template writes no control token directly after a turn, it is the last of the model's end tokens that the
        model's own template writes, or else the first.

        >>> import rlkit
        >>> tokenizer = rlkit.connect("toy").tokenizer
        >>> tokenizer.decode(Chat(tokenizer).end, skip_special=False)
        '<|im_end|>'
        """
        ends = self.tokenizer.eos_ids if self._closing is None else (self._closing,)
        if self._closing is None and ends and self.tokenizer.chat_template is not None:
            said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            with contextlib.suppress(DataError):  # a template that cannot be rendered without tools
                rendered = self.tokenizer.apply_chat_template(said, add_generation_prompt=False)
                ends = tuple(token for token in rendered.tolist() if token in ends)[-1:] or ends
        return np.array(ends[:1], np.int64)

    def with_options(self, **changes: Any) -> Chat:
        """Return a chat with the same tokenizer and these arguments of ``Chat`` replaced.

        Raises:
            ConfigError: as for ``Chat``; there is no such argument.

        >>> import rlkit
        >>> Chat(rlkit.connect("toy").tokenizer, system="Be brief.").with_options(history="append").history
        'append'
        """
        _check.check_keywords("Chat", Chat, changes)
        if changes.keys() != {"prefill"}:
            return attrs.evolve(self, **changes)
        chat = copy.copy(self)  # nothing is compiled again
        chat.prefill = changes["prefill"]
        return chat

    def start(self, observation: Observation, tools: Sequence[Message] = ()) -> Conversation:
        """Begin a conversation with what an environment said first.

        Args:
            observation: text (a user message), messages, or token ids [T], which are sent as they are.
            tools: function schemas, OpenAI style. The renderer or the template renders them; where it does not, a
                description in ``tool_format`` is put into the system prompt.

        Raises:
            DataError: an observation of another form, or messages that the template refuses.
        """
        return Conversation(self, observation, tools)

    def message(self, text: str, role: str = "user") -> np.ndarray:
        """Return the tokens of one message alone, without the head of an answer.

        Text that reads like control tokens stays text. Without a template it is the text and an empty line.

        Raises:
            DataError: the template refuses a conversation of this message alone.

        >>> import rlkit
        >>> tokenizer = rlkit.connect("toy").tokenizer
        >>> print(tokenizer.decode(Chat(tokenizer).message("Hi"), skip_special=False).strip())
        <|im_start|>user
        Hi<|im_end|>
        """
        marked = self.control.mark({"role": role, "content": text})
        if self.renderer is not None:
            return self.renderer.render([marked], (), head=False)
        text = f"{marked['content']}\n\n" if self.template is None else self.make_prompts(()).write([marked])
        return self.control.encode(text)

    def action(
        self,
        tokens: ArrayLike,
        stop_reason: Literal["stop", "length"] = "stop",
        *,
        prompt: ArrayLike = (),
        tools: Sequence[Message] = (),
    ) -> Action:
        """Return what an environment is given for sampled tokens.

        Args:
            tokens: int [n].
            stop_reason: whether the policy ended its turn or was cut.
            prompt: int [P], what they were sampled for; it says whether reasoning had begun.
            tools: the schemas of the conversation; response templates and renderers read arguments by them.
        """
        ids = _check.token_ids("tokens", tokens, vocab_size=self.tokenizer.vocab_size)
        ended = ids.size > 0 and int(ids[-1]) in self.ends
        text = self.prefill + self.tokenizer.decode(ids[:-1] if ended else ids)
        raw = self.prefill + self.tokenizer.decode(ids, skip_special=False)
        read: Parsed | Malformed | None = None
        if self._reader is not None or self.renderer is not None:
            before = _check.token_ids("prompt", prompt, vocab_size=self.tokenizer.vocab_size)
            head = self.control.encode(self.prefill, first=False)
            before = before[: max(before.size - head.size, 0)]  # the prefill is part of the turn
            if self._reader is not None:
                read = self._reader.read(raw, self.tokenizer.decode(before, skip_special=False), tools)
            elif self.renderer is not None:
                read = self.renderer.parse(np.concatenate([head, ids]), before, tools, raw)
        parsed, unread = (None, read) if isinstance(read, Malformed) else (read, None)
        return Action(text, tokens=ids, raw=raw, stop_reason=stop_reason, parsed=parsed, unread=unread)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` that stop at all of ``ends``, also at those that are not the model's end tokens."""
        more: Sequence[int | str] = sorted(self.ends.difference(self.tokenizer.eos_ids))
        if not more or params.stop == ():
            return params
        stop = params.stop or ()
        if stop and isinstance(stop[0], str):
            more = [self.tokenizer.decode(np.array([token]), skip_special=False) for token in more]
        return attrs.evolve(params, stop=tuple(dict.fromkeys([*stop, *more])))

    def make_prompts(self, tools: Sequence[Message]) -> TemplatePrompts | RendererPrompts:
        """Return what writes the prompts of one conversation."""
        return RendererPrompts(self, self.renderer, tools) if self.renderer else TemplatePrompts(self, tools)

    def _find_closing(self, known: frozenset[int]) -> int | None:
        """Return the control token that ends a turn of the policy as it is written; warn if it is not in ``known``.

        None: text follows a turn, or nothing, or the template writes the last turn unlike the others with an unknown
        token, which may begin something else.
        """
        said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
        last, inner = (self._read_after("Yes.", messages) for messages in (said, [*said, said[0]]))
        at = next((i for i, token in enumerate(last) if token in known), len(last))
        within = last[: at + 1] == inner[: at + 1]  # not only after the last turn, as some templates put the eos
        if not last or (within and at < len(last)) or last[:1] != inner[:1]:
            return next(iter(last[at:]), None)
        text = self.tokenizer.decode(last[:1], skip_special=False)
        ends = self.tokenizer.decode(list(self.tokenizer.eos_ids), skip_special=False) or "it has none"
        message = (
            f"Chat: the chat template ends a turn with {text!r} (id {last[0]}), which is not an end token of the model "
            f"({ends}); conversations stop there and train it, requests without a Chat do not stop there"
        )
        if message not in _warned:
            warn(message)
            _warned.add(message)
        return last[0]

    def _read_after(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Return the control tokens that come directly after ``text`` in the rendered messages."""
        try:
            written = self.make_prompts(()).write(messages)
        except DataError:
            return []
        return self.control.leading_ids(written.partition(text)[2])

    def _find_switches(self) -> dict[str, bool]:
        """Return the variables of the template that switch thinking."""
        if self.thinking is None:
            return {}
        known = [name for name in ("enable_thinking", "thinking") if self.template and name in self.template.names]
        if not known:
            what = "the template does not read enable_thinking" if self.template else "the model has no template"
            expected = "a template that reads it"
            raise ConfigError("Chat.thinking", what, expected, "prefill can begin the turn instead")
        return dict.fromkeys(known, self.thinking)
