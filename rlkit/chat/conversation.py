"""One conversation: the prompt now, and the next one from it without touching what is there."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence

import numpy as np

from rlkit import _check
from rlkit._interaction import Action, Message, Observation
from rlkit.chat.core import Chat
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
            after an earlier turn was rewritten (see ``Chat.history``).
        messages: everything said, as dicts with ``role`` and ``content``, for logs.
    """

    def __init__(self, chat: Chat, observation: Observation, tools: Sequence[Message] = ()) -> None:
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
            raise DataError("tools", f"got {_check.shown(tools)}", "a sequence of function schemas")
        self._chat = chat
        self.extends = False
        self.messages: list[Message] = []
        self._safe: list[Message] = []  # the same, safe to render
        self._schemas = tools
        self._prompts = chat.prompts(tools)
        self._as_tokens = False  # parts of the prompt never were text
        if isinstance(observation, np.ndarray):
            self.prompt = _check.frozen(self._tokens(observation))
            return
        self._begin(tools, _messages(observation))
        self.prompt = _check.frozen(self._prompts.first(self._safe))

    def add(self, action: Action, observation: Observation | None) -> None:
        """Append what was sampled for ``prompt``, as it was sampled, and what the environment answered.

        Args:
            action: from ``Chat.action``.
            observation: text, messages or token ids; None ends the conversation, and ``prompt`` stays.

        Raises:
            DataError: an observation of another form, or messages that cannot be rendered. Nothing is changed.
        """
        _check.require(isinstance(action, Action), "action", action, "an Action", "from Chat.action", error=DataError)
        before = len(self.messages), self._as_tokens
        try:
            self._add(action, observation)
        except Exception:
            del self.messages[before[0] :], self._safe[before[0] :]
            self._as_tokens = before[1]
            raise

    def begin_turn(self, text: str) -> None:
        """Have the policy's next turn begin with ``text``, which joins the prompt and the turn, as a prefill does.

        The action to ``add`` then is one of a chat with that prefill behind its own.
        """
        self.prompt = _check.frozen(np.concatenate([self.prompt, self._chat.control.encode(text, first=False)]))

    def fork(self) -> Conversation:
        """Return another conversation that begins with all of this one; what is added to one is not in the other."""
        other = copy.copy(self)
        vars(other).update(messages=list(self.messages), _safe=list(self._safe), _prompts=copy.copy(self._prompts))
        return other

    def _add(self, action: Action, observation: Observation | None) -> None:
        if self._chat.history == "none":
            self._begin_anew(action, observation)
            return
        turn = len(self._safe)
        self.messages.append({"role": "assistant", "content": str(action)})
        self._safe.append(self._prompts.turn(action))
        if observation is None:
            return
        before = np.concatenate([self.prompt, action.tokens])
        if isinstance(observation, np.ndarray):
            prompt = np.concatenate([before, self._tokens(observation)])
        else:
            self._append(_messages(observation))
            keep = self._as_tokens or self._chat.history == "append"
            prompt = self._prompts.following(self.prompt, action, self._safe, turn, keep=keep)
        extends = np.array_equal(prompt[: before.size], before)
        if self._as_tokens and not extends:
            what = "messages cannot be appended to these tokens, and token ids cannot be rendered anew"
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

    def _begin(self, tools: Sequence[Message], messages: list[Message]) -> None:
        """Put what the program, the tools and the environment want in the system prompt into one message."""
        chat, mark = self._chat, self._chat.control.mark
        parts = [] if chat.system is None else [(chat.system, mark(chat.system, foreign=False))]
        if tools and not self._prompts.renders_tools:
            from rlkit.tools import describe

            described = describe(tools, chat.tool_format)
            parts.append((described, mark(described)))
        if parts and messages and messages[0]["role"] == "system" and isinstance(messages[0].get("content"), str):
            text = messages.pop(0)["content"]
            parts.append((text, mark(text)))
        if parts:
            end = "\n\n" if messages and chat.template is None and chat.renderer is None else ""
            self.messages.append({"role": "system", "content": "\n\n".join(plain for plain, _ in parts)})
            self._safe.append({"role": "system", "content": "\n\n".join(marked for _, marked in parts) + end})
        self._append(messages)

    def _append(self, messages: list[Message]) -> None:
        """Add messages of the environment."""
        mark = self._chat.control.mark
        safe = [mark(m, foreign=m["role"] != "assistant", where=f"messages[{i}]") for i, m in enumerate(messages)]
        self.messages += messages
        self._safe += safe

    def _tokens(self, observation: np.ndarray) -> np.ndarray:
        """int64: what the environment gave as tokens, and the prefill; the log has its text."""
        chat = self._chat
        ids = _check.token_ids("observation", observation, vocab_size=chat.tokenizer.vocab_size)
        text = chat.tokenizer.decode(ids, skip_special=False)
        self.messages.append({"role": "user", "content": text})
        self._safe.append({"role": "user", "content": chat.control.mark(text)})
        self._as_tokens = True
        return np.concatenate([ids, chat.control.encode(chat.prefill, first=False)])


def _messages(observation: object) -> list[Message]:
    """Return the observation as messages."""
    if isinstance(observation, str):
        return [{"role": "user", "content": str(observation)}]
    if not isinstance(observation, Sequence) or isinstance(observation, (bytes, bytearray)):
        expected = "text, a list of messages, or an array of token ids"
        raise DataError("observation", f"got {_check.shown(observation)}", expected)
    messages: list[Message] = []
    for i, message in enumerate(observation):
        where = f"observation[{i}]"
        _check.require(isinstance(message, Mapping), where, message, "a message: {'role', 'content'}", error=DataError)
        role = message.get("role")
        if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
            raise DataError(f"{where}['role']", f"got {_check.shown(role)}", "a name such as 'user'")
        if not isinstance(message.get("content"), (str, list, type(None))):
            shown = _check.shown(message["content"])
            raise DataError(f"{where}['content']", f"got {shown}", "text, a list of parts, or None")
        messages.append(dict(message))
    return messages
