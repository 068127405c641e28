"""Which recorded turn a request continues.

Clients send the whole conversation with every call. A digest of all messages up to and with a turn of the policy finds
that turn again; what stands behind it is then put behind the tokens that were sampled. A conversation that was
rewritten has another digest, finds nothing, and begins anew.

A turn that a stop text or a limit ended is open: clients write on where the policy stopped, "</code>" which they had
as their stop, or what they did with it. Such text is put behind the tokens, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import cast

from rlkit._interaction import Message
from rlkit.gateway.tree import Node
from rlkit.gateway.types import Choice, Request

__all__ = ["History", "digests", "policy_turn", "rendered"]


class History:
    """Turns by the digest of what was said up to and with them."""

    def __init__(self) -> None:
        self._turns: dict[bytes, Node] = {}
        self._open: dict[bytes, list[tuple[str, Node]]] = {}  # by what was said before them, with what they said
        self._texts: list[Node] = []

    def find(self, request: Request, chain: Sequence[bytes]) -> tuple[Node | None, int, str]:
        """Return the last recorded turn in the request's messages, and where it is.

        Args:
            request: of a client.
            chain: the digests of its messages; see ``digests``.

        Returns:
            The turn; how many messages there are up to and with it; and what the client has written behind what the
            policy said in it. None, 0, "" where there is no such turn.
        """
        messages = request.messages or ()
        for i in range(len(messages), 0, -1):
            if messages[i - 1].get("role") != "assistant":
                continue
            if (node := self._turns.get(chain[i])) is not None:
                return node, i, ""
            node, rest = self._written_on(messages[i - 1], chain[i - 1])
            if node is not None:
                return node, i, rest
        return None, 0, ""

    def _written_on(self, message: Message, before: bytes) -> tuple[Node | None, str]:
        """Return the open turn that begins the message, and the rest of it; the longest, and of those the newest."""
        text = _text(message)
        if message.get("tool_calls") or not isinstance(text, str):
            return None, ""
        best: Node | None = None
        rest = ""
        for said, node in self._open.get(before, ()):
            behind = _behind(text, said)
            if behind is not None and (best is None or len(behind) <= len(rest)):
                best, rest = node, behind
        return best, rest

    def find_text(self, text: str) -> Node | None:
        """Return the turn with the longest text that ``text`` begins with; None where there is none."""
        fitting = [node for node in self._texts if node.text and text.startswith(node.text)]
        return max(fitting, key=lambda node: len(node.text or ""), default=None)

    def add(self, node: Node, chain: Sequence[bytes], choice: Choice, open_text: str | None) -> None:
        """Remember a turn.

        Args:
            node: it.
            chain: the digests of the conversation that it answered.
            choice: as the client was told.
            open_text: all that was said, where the policy did not end the turn; None: it did.
        """
        self._turns[_next(chain[-1], policy_turn(choice))] = node
        if open_text is not None and not choice.calls:
            self._open.setdefault(chain[-1], []).append((open_text, node))

    def add_text(self, node: Node) -> None:
        """Remember a turn that continued a text."""
        self._texts.append(node)


def _behind(text: str, said: str) -> str | None:
    r"""Return what a text has behind what was said; None if it does not begin so, white space around that aside.

    >>> _behind("f(x)</code>\nCalling", "f(x)</code>\n\n"), _behind("Yesterday", "Yes "), _behind("Yes", " ")
    ('Calling', None, None)
    """
    text, said = text.lstrip(), said.lstrip()
    if not said or text.startswith(said):
        return text[len(said) :] if said else None
    trimmed = said.rstrip()
    rest = text[len(trimmed) :]
    return rest.lstrip() if text.startswith(trimmed) and rest[:1].strip() == "" else None


def policy_turn(choice: Choice) -> Message:
    """Return a completion as the message that clients send back."""
    turn: dict[str, object] = {"role": "assistant", "content": choice.content}
    if choice.calls:
        functions = [(call.id, {"name": call.name, "arguments": dict(call.arguments)}) for call in choice.calls]
        turn["tool_calls"] = [{"id": i, "type": "function", "function": function} for i, function in functions]
    return turn


def digests(request: Request) -> list[bytes]:
    """Return digests of the first 0, 1, 2, ... messages, each with the tools and what the template is to see."""
    about = [request.tools, request.template]
    chain = [_digest(json.dumps(about, sort_keys=True, default=str))]
    for message in request.messages or ():
        chain.append(_next(chain[-1], message))
    return chain


def _next(before: bytes, message: Message) -> bytes:
    return _digest(before.hex() + json.dumps(_essence(message), sort_keys=True, default=str))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _essence(message: Message) -> list[object]:
    """Return what tells two messages apart.

    Of the policy's turns clients may leave out reasoning, and trim the text. Ids of calls are not compared.
    """
    role, text = message.get("role"), _text(message)
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if role == "assistant" and isinstance(text, str):
        text = text.strip()
    return [role, text, calls, None if role in ("assistant", "tool") else message.get("name")]


def _text(message: Message) -> object:
    """Return a message's content, its parts as one text."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content or ""


def _call(call: object) -> list[object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return [str(call)]
    return [function.get("name"), _arguments(function.get("arguments"))]


def _arguments(value: object) -> object:
    """Return arguments as an object; what is no JSON stays the text that it is."""
    if not isinstance(value, str):
        return value
    try:
        return cast("object", json.loads(value))
    except (ValueError, RecursionError):
        return value


def rendered(message: Message) -> Message:
    """Return a message as templates want it: content that is text, and arguments of calls that are objects."""
    ready = dict(message)
    if ready.get("content") is None:
        ready["content"] = ""
    if ready.get("tool_calls"):
        ready["tool_calls"] = [_rendered_call(call) for call in ready["tool_calls"]]
    return ready


def _rendered_call(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = _arguments(function.get("arguments"))
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except ValueError:  # half of a surrogate pair, which JSON can name and no tokenizer reads
        arguments = function.get("arguments")
    return {**call, "function": {**function, "arguments": arguments}}
