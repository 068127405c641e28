"""One conversation: the prompt now, and the next one from it without touching what is there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlkit import _check
from rlkit._interaction import Action, Observation
from rlkit.chat.control import PLACEHOLDER
from rlkit.chat.core import Chat
from rlkit.chat.templates import Template
from rlkit.errors import DataError

__all__ = ["Conversation"]

_ROLE = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)


class Conversation:
    """What was said so far, as tokens and as messages. Made by ``Chat.start``.

    The next prompt is the previous prompt, the sampled tokens, what closes the policy's turn if the policy did not
    close it itself, the new messages, and the head of the next turn. Only the new part is tokenised.

    Attributes:
        prompt: int64 [P], what the sampler is to be given now.
        extends: whether ``prompt`` begins with the previous prompt and the tokens sampled for it; False at first, and
            after a template has rewritten an earlier turn (see ``Chat.history``).
        messages: everything said, as dicts with ``role`` and ``content``, for logs.
    """

    def __init__(self, chat: Chat, observation: Observation, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._chat = chat
        self.extends = False
        self.messages: list[dict[str, Any]] = []
        self._marked: list[dict[str, Any]] = []  # the same, safe to render
        self._template: Template | None = chat.template
        self._schemas = tools
        self._tools = self._rendered_by(tools)
        self._text: str | None = None  # the rendering behind ``prompt``, without prefill
        self._as_tokens = False  # parts of the prompt never were text
        if isinstance(observation, np.ndarray):
            self.prompt = self._tokens(observation)
            return
        text = "".join(self._begin(tools, _messages(observation)))
        if self._template is not None:
            text = self._text = self._render()
        self.prompt = _check.frozen(self._encode(text + chat.prefill))

    def add(self, action: Action, observation: Observation | None) -> None:
        """Appends what was sampled for ``prompt``, as it was sampled, and what the environment answered.

        Args:
            action: from ``Chat.action``.
            observation: text, messages or token ids; None ends the conversation, and ``prompt`` stays.

        Raises:
            DataError: an observation of another form, or messages that the template refuses. Nothing is changed.
        """
        if not isinstance(action, Action):
            raise DataError(_check.problem("action", f"got {_check.shown(action)}", "an Action", "from Chat.action"))
        kept = len(self.messages), self._as_tokens, self._text
        try:
            self._add(action, observation)
        except Exception:
            del self.messages[kept[0] :], self._marked[kept[0] :]
            self._as_tokens, self._text = kept[1:]
            raise

    def _add(self, action: Action, observation: Observation | None) -> None:
        if self._chat.history == "none":
            self._begin_anew(action, observation)
            return
        before = self._before()
        said = self._said(action)
        self.messages.append({"role": "assistant", "content": str(action)})
        self._marked.append({"role": "assistant", "content": said})
        if observation is None:
            return
        if isinstance(observation, np.ndarray):
            new: np.ndarray | None = self._tokens(observation)
            self._text = None
        elif self._template is None:
            texts = self._append(_messages(observation))
            new = self._encode("".join(texts) + self._chat.prefill, first=False)
        else:
            at = len(self._marked)
            self._append(_messages(observation))
            self._text = self._render()
            new = self._rest(before, said, at, action)
        self.extends = new is not None
        if new is None:
            new = self._encode(f"{self._text}{self._chat.prefill}")
        else:
            new = np.concatenate([self.prompt, action.tokens, new])
        self.prompt = _check.frozen(new)

    def _begin_anew(self, action: Action, observation: Observation | None) -> None:
        """The next prompt is what another conversation would begin with; the log goes on."""
        said = [{"role": "assistant", "content": str(action)}]
        if observation is not None:
            fresh = Conversation(self._chat, observation, self._schemas)
            said += [message for message in fresh.messages if message["role"] != "system"]
            self.prompt, self.extends = fresh.prompt, False
        self.messages += said

    def _rest(self, before: str, said: str, at: int, action: Action) -> np.ndarray | None:
        """int64: what follows the sampled tokens; None where the template has rewritten what came before them."""
        assert self._text is not None  # noqa: S101
        rest = _after(self._text, before, said)
        if rest is None:
            if self._chat.history == "template" and not self._as_tokens:
                return None
            rest = self._after_placeholder(at)
        ids = self._encode(rest + self._chat.prefill, first=False)
        ended = action.tokens.size > 0 and int(action.tokens[-1]) in self._chat.tokenizer.eos_ids
        if ended and ids.size and (ids[0] == action.tokens[-1] or self._closes(before, said, at, int(ids[0]))):
            ids = ids[1:]
        return ids

    def _closes(self, before: str, said: str, at: int, token: int) -> bool:
        """Whether the template ends the policy's turn with this control token: the policy had ended it with another."""
        if token not in self._chat.control.special_ids:
            return False
        try:
            closing = _after(self._render(at, head=False), before, said)
        except DataError:
            return False
        ids = self._encode(closing or "", first=False)
        return bool(ids.size and ids[0] == token)

    def _after_placeholder(self, at: int) -> str:
        """What the template writes behind the policy's last turn, whatever it makes of the turn itself."""
        turn = at - 1
        messages = [*self._marked[:turn], {"role": "assistant", "content": PLACEHOLDER}, *self._marked[at:]]
        parts = self._render_these(messages, head=True).split(PLACEHOLDER)
        if len(parts) != 2:
            what = f"the template shows the policy's turn {len(parts) - 1} times"
            raise DataError(_check.problem("conversation", what, "once", "tokens cannot be appended to it"))
        return parts[1]

    def _begin(self, tools: Sequence[Mapping[str, Any]], messages: list[dict[str, Any]]) -> list[str]:
        """Puts what the program, the tools and the environment want in the system prompt into one message."""
        chat, mark = self._chat, self._chat.control.mark
        parts = [] if chat.system is None else [(chat.system, mark(chat.system, foreign=False))]
        if tools and self._tools is None:
            from rlkit.tools import describe

            described = describe(tools, chat.tool_format)
            parts.append((described, mark(described)))
        own = bool(parts)
        if own and messages and messages[0]["role"] == "system" and isinstance(messages[0].get("content"), str):
            text = messages[0]["content"]
            parts.append((text, mark(text)))
            messages = messages[1:]
        if own:
            self.messages.append({"role": "system", "content": "\n\n".join(plain for plain, _ in parts)})
            self._marked.append({"role": "system", "content": "\n\n".join(marked for _, marked in parts)})
            separator = ["\n\n"] if messages else []
            return [self._marked[0]["content"], *separator, *self._append(messages)]
        return self._append(messages)

    def _append(self, messages: list[dict[str, Any]]) -> list[str]:
        """Adds messages of the environment; returns their marked texts."""
        mark = self._chat.control.mark
        safe = [mark(m, foreign=m["role"] != "assistant", where=f"messages[{i}]") for i, m in enumerate(messages)]
        texts = [m.get("content") for m in safe]
        if self._template is None and not all(isinstance(text, str) for text in texts):
            what = "a message has no text, and the model has no chat template"
            raise DataError(_check.problem("observation", what, "messages with text"))
        self.messages += messages
        self._marked += safe
        return [text for text in texts if isinstance(text, str)]

    def _tokens(self, observation: np.ndarray) -> np.ndarray:
        """int64: what the environment gave as tokens, and the prefill; the log has its text."""
        ids = _check.token_ids("observation", observation, vocab_size=self._chat.tokenizer.vocab_size)
        text = self._chat.tokenizer.decode(ids, skip_special=False)
        self.messages.append({"role": "user", "content": text})
        self._marked.append({"role": "user", "content": self._chat.control.mark(text)})
        self._as_tokens = True
        return np.concatenate([ids, self._encode(self._chat.prefill, first=False)])

    def _rendered_by(self, tools: Sequence[Mapping[str, Any]]) -> list[Any] | None:
        """The schemas for the template; None where it takes none."""
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
            raise DataError(_check.problem("tools", f"got {_check.shown(tools)}", "a sequence of function schemas"))
        if tools:
            self._template = self._chat.tool_template
        if not tools or self._template is None or "tools" not in self._template.names:
            return None
        safe: list[Any] = self._chat.control.mark(list(tools), where="tools")
        return safe

    def _before(self) -> str:
        """The rendering that the policy saw; made now if the prompt was given as tokens."""
        if self._template is None:
            return ""
        if self._text is None:
            self._text = self._render()
        return self._text

    def _said(self, action: Action) -> str:
        """The policy's turn, safe to render; the prefill is the program's and keeps its control tokens."""
        prefill, mark = self._chat.prefill, self._chat.control.mark
        if prefill and action.startswith(prefill):
            return prefill + str(mark(str(action)[len(prefill) :], foreign=False))
        return str(mark(str(action), foreign=False))

    def _render(self, end: int | None = None, *, head: bool = True) -> str:
        return self._render_these(self._marked[:end], head=head)

    def _render_these(self, messages: list[dict[str, Any]], *, head: bool) -> str:
        assert self._template is not None  # noqa: S101
        return self._template.render(messages, head=head, **{**self._chat.variables, "tools": self._tools})

    def _encode(self, text: str, *, first: bool = True) -> np.ndarray:
        return self._chat.control.encode(text, first=first)


def _after(text: str, before: str, said: str) -> str | None:
    r"""What stands in ``text`` behind ``before`` and ``said``; None if it does not begin with them, white space aside.

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


def _messages(observation: Any) -> list[dict[str, Any]]:
    """The observation as messages."""
    if isinstance(observation, str):
        return [{"role": "user", "content": str(observation)}]
    if not isinstance(observation, Sequence) or isinstance(observation, (bytes, bytearray)):
        expected = "text, a list of messages, or an array of token ids"
        raise DataError(_check.problem("observation", f"got {_check.shown(observation)}", expected))
    messages = []
    for i, message in enumerate(observation):
        where = f"observation[{i}]"
        if not isinstance(message, Mapping):
            raise DataError(_check.problem(where, f"got {_check.shown(message)}", "a message: {'role', 'content'}"))
        role = message.get("role")
        if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
            raise DataError(_check.problem(f"{where}['role']", f"got {_check.shown(role)}", "a name such as 'user'"))
        if not isinstance(message.get("content"), (str, list, type(None))):
            shown = _check.shown(message["content"])
            raise DataError(_check.problem(f"{where}['content']", f"got {shown}", "text, a list of parts, or None"))
        messages.append(dict(message))
    return messages
