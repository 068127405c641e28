"""The prompts of a conversation, written with the model's chat template.

Messages are marked here: see ``ControlText``. ``rlkit.chat.rendering`` has the same methods over a renderer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlkit._interaction import Action, Message
from rlkit.chat.control import PLACEHOLDER
from rlkit.errors import DataError

if TYPE_CHECKING:
    from rlkit.chat.core import Chat

__all__ = ["TemplatePrompts"]


class TemplatePrompts:
    """Prompts by a chat template; without one the texts, one after the other."""

    def __init__(self, chat: Chat, tools: Sequence[Message]) -> None:
        self._chat = chat
        self._template = chat.tool_template if tools else chat.template
        self.renders_tools = self._template is not None and "tools" in self._template.names
        self._tools = chat.control.mark(list(tools), where="tools") if tools and self.renders_tools else None
        self._rendered = -1, ""  # how many messages the last prompt has, and its text without prefill

    def turn(self, action: Action) -> Message:
        """Return the policy's turn; the prefill is the program's and keeps its control tokens."""
        prefill, mark = self._chat.prefill, self._chat.control.mark
        head = prefill if prefill and action.startswith(prefill) else ""
        return {"role": "assistant", "content": head + mark(str(action)[len(head) :], foreign=False)}

    def first(self, messages: Sequence[Message]) -> np.ndarray:
        """Render all messages and the head of the policy's turn: int64 [P]."""
        text = self._text(messages)
        self._rendered = len(messages), text
        return self._encode(text + self._chat.prefill, first=True)

    def following(
        self, prompt: np.ndarray, action: Action, messages: Sequence[Message], turn: int, *, keep: bool
    ) -> np.ndarray:
        """Append to ``prompt`` and the tokens sampled for it what ``messages`` have behind the policy's ``turn``.

        Where an earlier turn is written differently now, render all messages; ``keep`` forbids that as far as it can
        be forbidden.

        Returns:
            int64 [P].
        """
        text = self._text(messages if self._template else messages[turn + 1 :])
        if self._template is None:
            return np.concatenate([prompt, action.tokens, self._encode(text + self._chat.prefill)])
        known, before = self._rendered
        before = before if known == turn else self._text(messages[:turn])  # the prompt may have been given as tokens
        said = messages[turn]["content"]
        rest = _after(text, before, said)
        if rest is None:
            if not keep:
                return self.first(messages)
            rest = self._after_placeholder(messages, turn)
        ids = self._encode(rest + self._chat.prefill)
        ended = action.tokens.size > 0 and int(action.tokens[-1]) in self._chat.ends
        if ended and ids.size and ids[0] in (action.tokens[-1], *self._closing(messages[: turn + 1], before, said)):
            ids = ids[1:]
        self._rendered = len(messages), text
        return np.concatenate([prompt, action.tokens, ids])

    def _closing(self, messages: Sequence[Message], before: str, said: str) -> np.ndarray:
        """int64: the control token with which the template closes the policy's turn, if it does so with one."""
        try:
            text = _after(self._text(messages, head=False), before, said)
        except DataError:
            text = None
        return np.intersect1d(self._encode(text or "")[:1], self._chat.control.special_ids)

    def _after_placeholder(self, messages: Sequence[Message], turn: int) -> str:
        """Return what the template writes behind the policy's last turn, whatever it makes of the turn itself."""
        shown: Message = {"role": "assistant", "content": PLACEHOLDER}
        parts = self._text([*messages[:turn], shown, *messages[turn + 1 :]]).split(PLACEHOLDER)
        if len(parts) != 2:
            what = f"the template shows the policy's turn {len(parts) - 1} times"
            raise DataError("conversation", what, "once", "tokens cannot be appended to it")
        return parts[1]

    def _text(self, messages: Sequence[Message], *, head: bool = True) -> str:
        if self._template is not None:
            return self._template.render(messages, head=head, **{**self._chat.variables, "tools": self._tools})
        texts = [message.get("content") for message in messages]
        if not all(isinstance(text, str) for text in texts):
            what = "a message has no text, and the model has no chat template"
            raise DataError("observation", what, "messages with text")
        return "".join(map(str, texts))

    def _encode(self, text: str, *, first: bool = False) -> np.ndarray:
        return self._chat.control.encode(text, first=first)


def _after(text: str, before: str, said: str) -> str | None:
    r"""Return what stands in ``text`` behind ``before`` and ``said``; None if it does not begin so, white space aside.

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
