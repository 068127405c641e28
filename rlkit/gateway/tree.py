"""The turns that were sampled in a session, as a tree: each continues the tokens of its parent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from rlkit._interaction import Action
from rlkit.chat import Conversation
from rlkit.types import Sample

__all__ = ["Branch", "Node", "Tree"]


@attrs.define(eq=False, repr=False)
class Node:
    """One turn of the policy.

    Attributes:
        number: counted from 0 in the order in which turns ended.
        sample: as it was drawn.
        parent: the turn whose prompt and tokens this one's prompt begins with, the longest such; None: there is none.
        children: the turns that continue this one.
        conversation: what was said up to this turn's prompt, ready for more; None for a prompt of text or tokens.
        action: the turn as a conversation takes it.
        text: the prompt and the turn as text, for a prompt of text; None otherwise.
    """

    number: int
    sample: Sample
    parent: Node | None
    conversation: Conversation | None = None
    action: Action | None = None
    text: str | None = None
    children: list[Node] = attrs.field(factory=list)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [P + n]: the prompt and what was sampled for it."""
        return np.concatenate([self.sample.prompt, self.sample.tokens])

    @property
    def path(self) -> list[Node]:
        """The turns from the root of the tree to this one."""
        nodes, node = [], self
        while True:
            nodes.append(node)
            if node.parent is None:
                return nodes[::-1]
            node = node.parent

    def __repr__(self) -> str:
        parent = None if self.parent is None else self.parent.number
        return f"Node({self.number}, parent={parent}, P={self.sample.prompt.size}, n={self.sample.tokens.size})"


@attrs.frozen(eq=False, repr=False)
class Branch:
    """The turns from the beginning to one that nothing continues.

    Attributes:
        nodes: in order; branches share those before they part.
        fresh: those of them that no earlier branch has.
    """

    nodes: Sequence[Node]
    fresh: Sequence[Node]

    @property
    def last(self) -> Node:
        """The turn that nothing continues."""
        return self.nodes[-1]

    @property
    def messages(self) -> list[dict[str, object]]:
        """What was said, its last turn included; [] for prompts of text or tokens."""
        conversation, action = self.last.conversation, self.last.action
        if conversation is None or action is None:
            return []
        return [*map(dict, conversation.messages), {"role": "assistant", "content": str(action)}]

    def __repr__(self) -> str:
        return f"Branch({[node.number for node in self.nodes]})"


class Tree:
    """Turns in the order in which they ended. Not safe for threads: its session holds a lock."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(
        self,
        sample: Sample,
        *,
        hint: Node | None = None,
        conversation: Conversation | None = None,
        action: Action | None = None,
        text: str | None = None,
    ) -> Node:
        """Record a turn and return its node; ``hint`` is the turn whose conversation it continues, if it is known."""
        parent = self.parent(sample.prompt, hint)
        node = Node(len(self.nodes), sample, parent, conversation, action, text)
        self.nodes.append(node)
        if parent is not None:
            parent.children.append(node)
        return node

    def parent(self, prompt: np.ndarray, hint: Node | None = None) -> Node | None:
        """Return the turn with the most tokens that ``prompt`` [P] begins with, and None where there is none."""
        if hint is not None and _begins(prompt, hint):
            candidates: Iterable[Node] = hint.children
        else:
            hint, candidates = None, [node for node in self.nodes if node.parent is None]
        while True:
            longer = [node for node in candidates if _begins(prompt, node)]
            if not longer:
                return hint
            hint = max(longer, key=lambda node: (_size(node), node.number))
            candidates = hint.children

    @property
    def branches(self) -> list[Branch]:
        """Every branch once, in the order of their last turns."""
        seen: set[int] = set()
        branches = []
        for leaf in (node for node in self.nodes if not node.children):
            path = leaf.path
            branches.append(Branch(path, [node for node in path if node.number not in seen]))
            seen.update(node.number for node in path)
        return branches


def _size(node: Node) -> int:
    return int(node.sample.prompt.size + node.sample.tokens.size)


def _begins(prompt: np.ndarray, node: Node) -> bool:
    """Whether a prompt begins with all of a turn's tokens, and is more than the turn's own prompt."""
    sample, start = node.sample, node.sample.prompt.size
    end = start + sample.tokens.size
    return (
        start < prompt.size
        and end <= prompt.size
        and np.array_equal(prompt[start:end], sample.tokens)
        and np.array_equal(prompt[:start], sample.prompt)
    )
