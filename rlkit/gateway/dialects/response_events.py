"""The events by which items of the responses API grow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from rlkit.gateway.dialects.call import Json
from rlkit.gateway.dialects.spelling import Kind, Part

__all__ = ["Item", "item_events"]

_NAMES: Final[Mapping[Kind, str]] = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


@attrs.frozen
class Item:
    """An item of an answer.

    Attributes:
        kind: what its text is.
        call: which call, where it is one.
        whole: the item as it is in the end.
    """

    kind: Kind
    call: int
    whole: Json

    @property
    def part(self) -> Json:
        """The one part of its content. Calls have none."""
        content = self.whole.get("content")
        return content[0] if isinstance(content, list) else {}

    @property
    def begun(self) -> Json:
        """The item before anything is in it."""
        empty: Json = {"arguments": ""} if self.kind == "call" else {"content": []}
        return {**self.whole, **empty, "status": "in_progress"}


def item_events(items: Sequence[Item], parts: Sequence[Part]) -> Iterator[Json]:
    """Yield the events of all items, from the parts of the answer."""
    for index, item in enumerate(items):
        where: Json = {"item_id": item.whole["id"], "output_index": index}
        yield {"type": "response.output_item.added", "output_index": index, "item": item.begun}
        if item.kind != "call":
            where["content_index"] = 0
            empty = {**item.part, "text": "", **({"logprobs": []} if item.kind == "content" else {})}
            yield {"type": "response.content_part.added", **where, "part": empty}
        for part in parts:
            if (part.kind, part.call) == (item.kind, item.call):
                yield {
                    "type": f"{_NAMES[item.kind]}.delta",
                    **where,
                    "delta": part.text,
                    **_logprobs(item, part.tokens),
                }
        if item.kind == "call":
            whole = {"arguments": item.whole["arguments"], "name": item.whole["name"]}
            yield {"type": f"{_NAMES[item.kind]}.done", **where, **whole}
        else:
            text = {"text": item.part["text"], **_logprobs(item, slice(None))}
            yield {"type": f"{_NAMES[item.kind]}.done", **where, **text}
            yield {"type": "response.content_part.done", **where, "part": item.part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item.whole}


def _logprobs(item: Item, tokens: slice) -> Json:
    entries = item.part.get("logprobs")
    return {"logprobs": entries[tokens]} if isinstance(entries, list) else {}
