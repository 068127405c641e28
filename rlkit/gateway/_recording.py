"""The turns of a session as a tree: the turn that a request continues, and the branches that are trained.

Clients send the whole conversation with every call. A digest of all messages up to and with a turn of the policy finds
that turn again; the messages after it are then appended to the sampled tokens. A conversation that was
rewritten has another digest, matches no turn, and starts a new tree.

A turn that a stop text or a limit ended is open: clients may continue after the point where the policy stopped, with
"</code>", their stop text, or with its result. Such text is appended to the tokens, too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit._interaction import Action, Message
from rlkit.chat import Chat, Conversation
from rlkit.chat.messages import read_messages
from rlkit.errors import ConfigError
from rlkit.gateway._types import Choice, Request
from rlkit.tools.formats import opening
from rlkit.trajectory import Turn
from rlkit.types import Sample

__all__ = ["Branch", "Credit", "Node", "Prompt", "Recording", "make_turns", "weigh_nodes"]

_MOST_PROMPTS = 100_000  # whose repeats are counted: an open gateway answers any number


@attrs.define(eq=False, repr=False)
class Node:
    """One turn of the policy.

    Attributes:
        number: counted from 0 in the order of the turns' ends.
        sample: as it was drawn.
        parent: the turn whose prompt and tokens this one's prompt begins with, the longest such; None: no turn.
        children: the turns that continue this one.
        conversation: the conversation up to this turn's prompt, ready for more; None for a prompt of text or tokens.
        action: the turn as a conversation takes it.
    """

    number: int
    sample: Sample
    parent: Node | None
    conversation: Conversation | None = None
    action: Action | None = None
    children: list[Node] = attrs.field(factory=list)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [P + n]: the prompt and what was sampled for it."""
        return np.concatenate([self.sample.prompt, self.sample.tokens])

    @property
    def size(self) -> int:
        """The number of these tokens."""
        return int(self.sample.prompt.size + self.sample.tokens.size)

    @property
    def path(self) -> list[Node]:
        """The turns from the root of the tree to this one."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    def __repr__(self) -> str:
        parent = None if self.parent is None else self.parent.number
        return f"Node({self.number}, parent={parent}, P={self.sample.prompt.size}, n={self.sample.tokens.size})"


@attrs.frozen(eq=False, repr=False)
class Branch:
    """The turns from the beginning to one that has no continuation.

    Attributes:
        nodes: in order; branches share those before they diverge.
        fresh: those of them that no earlier branch has.
    """

    nodes: Sequence[Node]
    fresh: Sequence[Node]

    @property
    def last(self) -> Node:
        """The turn without a continuation."""
        return self.nodes[-1]

    @property
    def messages(self) -> list[dict[str, object]]:
        """The messages, the last turn included; [] for prompts of text or tokens."""
        conversation, action = self.last.conversation, self.last.action
        if conversation is None or action is None:
            return []
        return [*map(dict, conversation.messages), {"role": "assistant", "content": str(action)}]

    def __repr__(self) -> str:
        return f"Branch({[node.number for node in self.nodes]})"


def _begins(prompt: np.ndarray, node: Node, *, low: int = 1) -> bool:
    """Return whether a prompt begins with all of a turn's tokens, with ``low`` or more after the turn's own prompt."""
    sample, start = node.sample, node.sample.prompt.size
    ends_with = start + low <= prompt.size and np.array_equal(prompt[start : node.size], sample.tokens)
    return ends_with and np.array_equal(prompt[:start], sample.prompt)


def _text_after(said: str, text: str) -> str | None:
    r"""Return the rest of a text that begins with ``said``, white space around that aside; None if it does not.

    >>> _text_after("x</code>\n\n", "x</code>\nCalling"), _text_after("Yes ", "Yesterday"), _text_after(" ", "Yes")
    ('Calling', None, None)
    """
    text, said = text.lstrip(), said.lstrip()
    if not said or text.startswith(said):
        return text[len(said) :] if said else None
    trimmed = said.rstrip()
    rest = text[len(trimmed) :]
    return rest.lstrip() if text.startswith(trimmed) and rest[:1].strip() == "" else None


def _digest_history(messages: Sequence[Message], request: Request) -> list[bytes]:
    """Return digests of the first 0, 1, 2, ... messages, each with the tools and the variables of the template."""
    first = _digest(json.dumps([request.tools, request.template], sort_keys=True, default=str))
    return list(itertools.accumulate(messages, _digest_next, initial=first))


def _digest_next(before: bytes, message: Message) -> bytes:
    return _digest(before.hex() + json.dumps(_essence(message), sort_keys=True, default=str))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _essence(message: Message) -> list[object]:
    """Return the parts of a message that distinguish it from others.

    Of the policy's turns clients may leave out reasoning, and trim the text. Ids of calls are not compared.
    """
    role, text = message["role"], message["content"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [[function["name"], function["arguments"]] for function in functions]
    policy = role == "assistant"
    return [role, text.strip() if policy else text, calls, None if policy or role == "tool" else message.get("name")]


@attrs.frozen(eq=False)
class Prompt:
    """A request as tokens, and its place.

    Attributes:
        tokens: int64 [P], what to sample from.
        chat: of the conversation.
        digest: of the tokens.
        repeat: how often this session requested them before.
        continues: the recorded turn whose conversation the request continues, if there is one.
        rewritten: the request has turns of the policy, and neither they nor their tokens were recorded.
        conversation: the conversation so far; None for a prompt of text or tokens.
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
        """The request's name among all of its session, independent of their order."""
        return f"{self.digest.hex()}/{self.repeat}"


class Recording:
    """Recorded turns, matched with what clients send. Safe for threads."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._turns: dict[bytes, Node] = {}  # by the digest of the conversation up to and with them
        self._open: dict[bytes, list[tuple[str, Node]]] = {}  # by the conversation before them, with their text
        self._repeats: dict[bytes, int] = {}
        self._lock = threading.Lock()

    @property
    def nodes(self) -> list[Node]:
        """The turns, in the order in which they ended."""
        with self._lock:
            return list(self._nodes)

    @property
    def branches(self) -> list[Branch]:
        """Every branch once, in the order of their last turns."""
        seen: set[int] = set()
        branches = []
        with self._lock:
            for path in (node.path for node in self._nodes if not node.children):
                branches.append(Branch(path, [node for node in path if node.number not in seen]))
                seen.update(node.number for node in path)
        return branches

    def prompt(self, chat: Chat, request: Request) -> Prompt:
        """Return the tokens to sample from: those of the turn that the request continues, and the new text after them.

        Raises:
            DataError: messages that the template refuses, or ids that are not tokens.
        """
        made = self.render(chat, request)
        digest = hashlib.blake2b(made.tokens.tobytes(), digest_size=16).digest()
        with self._lock:
            repeat = self._repeats.pop(digest, 0)
            self._repeats[digest] = repeat + 1
            if len(self._repeats) > _MOST_PROMPTS:
                del self._repeats[next(iter(self._repeats))]  # the least recently requested one
        return attrs.evolve(made, digest=digest, repeat=repeat)

    def render(self, chat: Chat, request: Request) -> Prompt:
        """Return the same without counting the request."""
        if request.prompt is not None:
            vocabulary = chat.tokenizer.vocab_size
            return Prompt(_check.token_ids("prompt", request.prompt, low_length=1, vocab_size=vocabulary), chat)
        if request.text is not None:
            return Prompt(chat.tokenizer.encode(request.text, special=True), chat)
        messages = read_messages(request.messages or ())
        chain = _digest_history(messages, request)
        with self._lock:
            node, told, rest = self._find(messages, chain)
            any_turns = bool(self._nodes)
        if node is not None and node.conversation is not None and node.action is not None:
            conversation, rewritten = node.conversation.fork(), False
            conversation.add(_append_text(chat, node.action, rest), messages[told:])
        else:
            node, conversation = None, chat.start(messages, request.tools)
            rewritten = any_turns and any(message["role"] == "assistant" for message in messages)
        if beginning := _forced_beginning(chat, request):
            conversation.begin_turn(beginning)
            chat = chat.with_options(prefill=chat.prefill + beginning)
        tokens = conversation.prompt
        if rewritten:  # only a field that the template does not show, such as a name, may have changed
            with self._lock:
                rewritten = self._parent(tokens) is None
        return Prompt(tokens, chat, continues=node, rewritten=rewritten, conversation=conversation, chain=chain)

    def add(self, prompt: Prompt, choice: Choice, action: Action) -> None:
        """Remember a completion."""
        with self._lock:
            parent = self._parent(choice.sample.prompt, prompt.continues)
            node = Node(len(self._nodes), choice.sample, parent, prompt.conversation, action)
            self._nodes.append(node)
            if parent is not None:
                parent.children.append(node)
            if prompt.conversation is not None:
                before, open_text = prompt.chain[-1], _open_text(prompt.chat, action, choice)
                self._turns[_digest_next(before, choice.message)] = node
                if open_text is not None and not choice.calls:
                    self._open.setdefault(before, []).append((open_text, node))

    def _parent(self, prompt: np.ndarray, hint: Node | None = None) -> Node | None:
        """Return the turn with the most tokens that ``prompt`` [P] begins with, or None.

        ``hint`` is the turn whose conversation it continues, if it is known.
        """
        if hint is not None and _begins(prompt, hint, low=0):  # after an empty turn the prompt may be the same again
            candidates: Iterable[Node] = hint.children
        else:
            hint, candidates = None, [node for node in self._nodes if node.parent is None]
        while True:
            longer = [node for node in candidates if _begins(prompt, node)]
            if not longer:
                return hint
            hint = max(longer, key=lambda node: (node.size, node.number))
            candidates = hint.children

    def _find(self, messages: Sequence[Message], chain: Sequence[bytes]) -> tuple[Node | None, int, str]:
        """Return the last recorded turn in a client's messages, and its position.

        Args:
            messages: of the client.
            chain: their digests.

        Returns:
            The turn; how many messages there are up to and with it; and the client's text after the policy's in it.
            None, 0, "" if there is no such turn.
        """
        for i in range(len(messages), 0, -1):
            if messages[i - 1]["role"] == "assistant":
                node, rest = self._turns.get(chain[i]), ""
                if node is None:
                    node, rest = self._find_open_turn(messages[i - 1], chain[i - 1])
                if node is not None:
                    return node, i, rest
        return None, 0, ""

    def _find_open_turn(self, message: Message, before: bytes) -> tuple[Node | None, str]:
        """Return the open turn that begins the message, and the rest of it; the longest, and of those the newest."""
        known = () if message.get("tool_calls") else reversed(self._open.get(before, []))
        after = [(node, _text_after(said, message["content"])) for said, node in known]
        found = [(node, rest) for node, rest in after if rest is not None]
        return min(found, key=lambda each: len(each[1]), default=(None, ""))


def _open_text(chat: Chat, action: Action, choice: Choice) -> str | None:
    """Return the policy's whole text, and the stop text that ended it; None where it ended its turn itself."""
    if action.tokens.size and int(action.tokens[-1]) in chat.ends:
        return None
    return choice.content + action.raw.removeprefix(choice.text) if action.raw.startswith(choice.text) else None


def _append_text(chat: Chat, action: Action, rest: str) -> Action:
    """Return a turn with the text that a client has added after it."""
    if not rest:
        return action
    control = chat.control
    tokens = np.concatenate([action.tokens, control.encode(control.mark(rest), first=False)])
    return Action(action.raw + rest, tokens=tokens, stop_reason=action.stop_reason)


def _forced_beginning(chat: Chat, request: Request) -> str:
    """Return the beginning of the call that the request wants to have, "" where the policy decides.

    A renderer writes calls in the model's own format, for which no beginning is known here: the policy decides.
    """
    if not request.tools or request.tool_choice in ("auto", "none") or chat.renderer is not None:
        return ""
    name = None if request.tool_choice == "required" else request.tool_choice
    return opening(chat.tool_format, name) or ""


Credit: TypeAlias = Literal["every", "last"] | Callable[[Sequence[Branch]], Sequence[float]]


def weigh_nodes(branches: Sequence[Branch], credit: Credit) -> dict[int, float]:
    """Return the number of a node -> its weight, >= 0: for a turn of several branches the largest of theirs.

    Args:
        branches: of a session.
        credit: "every": 1 for each; "last": 1 for the one that ended last, 0 for all others; or a function that is
            given the branches and returns their weights.

    Raises:
        ConfigError: another way, another number of weights, or one that is negative or not finite.
    """
    if credit == "every":
        weights: Sequence[float] = [1.0] * len(branches)
    elif credit == "last":
        newest = max((branch.last.number for branch in branches), default=0)
        weights = [float(branch.last.number == newest) for branch in branches]
    else:
        expected = "'every', 'last', or a function from branches to weights"
        _check.require(callable(credit), "credit", credit, expected)
        weights = list(credit(branches))
    if len(weights) != len(branches):
        raise ConfigError("credit", f"gave {len(weights)} weights", f"{len(branches)}", "one per branch")
    heaviest: dict[int, float] = {}
    for i, branch in enumerate(branches):
        weight = _check.real(f"credit: weight {i}", weights[i], low=0.0)
        heaviest |= {node.number: max(weight, heaviest.get(node.number, 0.0)) for node in branch.nodes}
    return heaviest


def make_turns(nodes: Sequence[Node], weights: Mapping[int, float], reward: float = 0.0) -> list[Turn]:
    """Return the nodes that count as turns; the last one has the reward."""
    counted = [node for node in nodes if weights[node.number] > 0]
    last = len(counted) - 1
    return [
        Turn(node.sample, reward if i == last else 0.0, weight=weights[node.number]) for i, node in enumerate(counted)
    ]
