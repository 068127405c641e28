"""What a session remembers: the tree of its turns, and which of them a request continues."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import attrs
import numpy as np

from rlkit import _check
from rlkit._interaction import Action
from rlkit.chat import Chat, Conversation
from rlkit.gateway.history import History, digests, rendered
from rlkit.gateway.tree import Branch, Node, Tree
from rlkit.gateway.types import Choice, Request
from rlkit.tools.formats import opening
from rlkit.types import Sample

__all__ = ["Prompt", "Recording"]

_MOST_PROMPTS = 100_000  # whose repeats are counted: an open gateway answers any number


@attrs.frozen(eq=False)
class Prompt:
    """A request as tokens, and its place.

    Attributes:
        tokens: int64 [P], what to sample from.
        chat: of the conversation.
        digest: of the tokens.
        repeat: how often they were asked for before in this session.
        continues: the recorded turn whose conversation or text the request continues, where there is one.
        rewritten: the request has turns of the policy, and neither they nor their tokens were recorded.
        conversation: what was said so far; None for a prompt of text or tokens.
        chain: digests of the request's messages.
    """

    tokens: np.ndarray
    chat: Chat
    digest: bytes = b""
    repeat: int = 0
    continues: Node | None = None
    rewritten: bool = False
    conversation: Conversation | None = None
    chain: Sequence[bytes] = ()

    @property
    def place(self) -> str:
        """Names the request among all of its session, whatever came first."""
        return f"{self.digest.hex()}/{self.repeat}"


class Recording:
    """Turns, found again by what clients send. Safe for threads."""

    def __init__(self) -> None:
        self._tree = Tree()
        self._history = History()
        self._asked: dict[bytes, int] = {}
        self._lock = threading.Lock()

    @property
    def nodes(self) -> list[Node]:
        """The turns, in the order in which they ended."""
        with self._lock:
            return list(self._tree.nodes)

    @property
    def branches(self) -> list[Branch]:
        """The branches, in the order of their last turns."""
        with self._lock:
            return self._tree.branches

    def prompt(self, chat: Chat, request: Request) -> Prompt:
        """Return the tokens to sample from: those of the turn that the request continues, and what is new behind them.

        Raises:
            DataError: messages that the template refuses, or ids that are no tokens.
        """
        made = self._prompt(chat, request)
        digest = hashlib.blake2b(made.tokens.tobytes(), digest_size=16).digest()
        with self._lock:
            repeat = self._asked.pop(digest, 0)
            self._asked[digest] = repeat + 1
            if len(self._asked) > _MOST_PROMPTS:
                del self._asked[next(iter(self._asked))]  # the one that was asked for longest ago
        return attrs.evolve(made, digest=digest, repeat=repeat)

    def render(self, chat: Chat, request: Request) -> np.ndarray:
        """Return the tokens alone; that they were asked for is not counted."""
        return self._prompt(chat, request).tokens

    def _prompt(self, chat: Chat, request: Request) -> Prompt:
        if request.prompt is not None:
            vocabulary = chat.tokenizer.vocab_size
            return Prompt(_check.token_ids("prompt", request.prompt, low_length=1, vocab_size=vocabulary), chat)
        if request.text is not None:
            return self._of_text(chat, request.text)
        chain, messages = digests(request), [rendered(message) for message in request.messages or ()]
        with self._lock:
            node, said, rest = self._history.find(request, chain)
            any_turns = bool(self._tree.nodes)
        if node is not None and node.conversation is not None and node.action is not None:
            conversation, rewritten = node.conversation.fork(), False
            conversation.add(_written_on(chat, node.action, rest), messages[said:])
        else:
            node, conversation = None, chat.start(messages, request.tools)
            rewritten = any_turns and any(message.get("role") == "assistant" for message in messages)
        if begins := _forced(chat, request):
            conversation.begin_turn(begins)
            chat = chat.with_options(prefill=chat.prefill + begins)
        tokens = conversation.prompt
        if rewritten:  # what the template does not show, such as a name, may have changed alone
            with self._lock:
                rewritten = self._tree.parent(tokens) is None
        return Prompt(tokens, chat, continues=node, rewritten=rewritten, conversation=conversation, chain=chain)

    def _of_text(self, chat: Chat, text: str) -> Prompt:
        with self._lock:
            node = self._history.find_text(text)
        if node is None or node.text is None:
            return Prompt(chat.tokenizer.encode(text, special=True), chat)
        rest = chat.tokenizer.encode(text[len(node.text) :], special=True)
        return Prompt(np.concatenate([node.tokens, rest]), chat, continues=node)

    def add(self, request: Request, prompt: Prompt, choice: Choice, action: Action) -> None:
        """Remember a completion."""
        text = None if request.text is None else request.text + choice.text
        sample: Sample = choice.sample
        with self._lock:
            node = self._tree.add(
                sample, hint=prompt.continues, conversation=prompt.conversation, action=action, text=text
            )
            if prompt.conversation is not None:
                self._history.add(node, prompt.chain, choice, _open_text(prompt.chat, action, choice))
            elif text is not None:
                self._history.add_text(node)


def _open_text(chat: Chat, action: Action, choice: Choice) -> str | None:
    """Return all that the policy said, and the stop text that ended it; None where it ended its turn itself."""
    if action.tokens.size and int(action.tokens[-1]) in chat.ends:
        return None
    return choice.content + action.raw.removeprefix(choice.text) if action.raw.startswith(choice.text) else None


def _written_on(chat: Chat, action: Action, rest: str) -> Action:
    """Return a turn with what a client has written behind it."""
    if not rest:
        return action
    control = chat.control
    tokens = np.concatenate([action.tokens, control.encode(control.mark(rest), first=False)])
    raw = action.raw + rest
    return Action(raw, tokens=tokens, raw=raw, stop_reason=action.stop_reason)


def _forced(chat: Chat, request: Request) -> str:
    """Return the beginning of the call that the request wants to have, "" where it leaves that to the policy.

    A renderer writes calls in the model's own way, which has no such beginning here: it is left to the policy.
    """
    if not request.tools or request.tool_choice in ("auto", "none") or chat.renderer is not None:
        return ""
    name = None if request.tool_choice == "required" else request.tool_choice
    return opening(chat.tool_format, name) or ""
