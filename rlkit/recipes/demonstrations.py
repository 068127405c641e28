"""Rows that are learnt from as they are: answers to imitate, and pairs of a better and a worse one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlkit.chat import Chat
from rlkit.errors import DataError
from rlkit.recipes.inputs import Format
from rlkit.recipes.rows import field
from rlkit.trajectory import Trajectory, Turn, datums
from rlkit.types import Datum, Sample

__all__ = ["check_rows", "conversation_of", "demonstrations", "preferences", "texts"]


def demonstrations(given: Sequence[Mapping[str, object]], form: Format, chat: Chat, where: str) -> list[list[Datum]]:
    """Return the datums of each row: prompts as the chat renders them, and every assistant message learnt.

    Args:
        given: rows with a prompt and a response, under the keys of ``form``, or with a list of messages.

    Raises:
        DataError: a row lacks a field, or has nothing to learn from.
    """
    data = []
    for i in range(len(given)):
        row, name = given[i], f"{where}: row {i}"
        key = _messages_key(row, form)
        if key in row:
            messages = _messages(row[key], name)
        else:
            prompt, answer = field(row, form.prompt_key, name), field(row, form.response_key, name)
            messages = [*_prompt(prompt), {"role": "assistant", "content": str(answer)}]
        data.append(conversation_of(chat, messages, name))
    return data


def preferences(given: Sequence[Mapping[str, object]], form: Format, chat: Chat, where: str) -> list[list[Datum]]:
    """Return the two datums of each row, chosen and rejected.

    Raises:
        DataError: as for ``demonstrations``.
    """
    pairs = []
    for i in range(len(given)):
        row, name = given[i], f"{where}: row {i}"
        prompt = _prompt(field(row, form.prompt_key, name))
        pair = []
        for key in (form.chosen_key, form.rejected_key):
            answer = {"role": "assistant", "content": str(field(row, key, name))}
            pair += conversation_of(chat, [*prompt, answer], name)
        pairs.append(pair)
    return pairs


def texts(given: Sequence[Mapping[str, object]], form: Format, chat: Chat, where: str) -> list[list[Datum]]:
    """Return the datum of each row's text, without a template: every token but the first is learnt.

    Raises:
        DataError: a row lacks the field, or its text has less than two tokens.
    """
    data = []
    for i in range(len(given)):
        name = f"{where}: row {i}"
        tokens = np.asarray(chat.tokenizer.encode(str(field(given[i], form.prompt_key, name))))
        if tokens.size < 2:
            raise DataError(f"{name}: its text has {tokens.size} tokens, so that none follows another")
        data.append([Datum(tokens, np.arange(tokens.size) > 0)])
    return data


def conversation_of(chat: Chat, messages: Sequence[Mapping[str, object]], where: str) -> list[Datum]:
    """Return datums that learn every assistant message, each with the end token that a sampler would stop at.

    Raises:
        DataError: there is no assistant message, or the conversation begins with one.
    """
    cuts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not cuts or cuts[0] == 0:
        what = "no message of the assistant" if not cuts else "nothing before the assistant's first message"
        raise DataError(f"{where}: there is {what}, so nothing to learn")
    end = _end(chat)
    conversation = chat.start(list(messages[: cuts[0]]))
    turns = []
    for cut, following in zip(cuts, [*cuts[1:], len(messages)], strict=True):
        text = str(messages[cut]["content"]).removeprefix(chat.prefill)
        tokens = np.concatenate([chat.tokenizer.encode(text), end])
        turns.append(Turn(Sample(conversation.prompt, tokens, np.zeros(tokens.size))))
        more = list(messages[cut + 1 : following])
        if following < len(messages):
            conversation.add(chat.action(tokens, "stop"), more)
    data = datums(Trajectory(turns), split="allow")
    return [Datum(datum.tokens, datum.mask) for datum in data]


def check_rows(given: Sequence[Mapping[str, object]], form: Format, data: str, where: str) -> None:
    """Raise DataError where a row lacks a field that ``data``, of a recipe, will be made from."""
    keys = {
        "pairs": (form.prompt_key, form.chosen_key, form.rejected_key),
        "texts": (form.prompt_key,),
    }.get(data, (form.prompt_key, form.response_key))
    for i in range(len(given)):
        if data in ("pairs", "texts") or _messages_key(given[i], form) not in given[i]:
            for key in keys:
                field(given[i], key, f"{where}: row {i}")


def _messages_key(row: Mapping[str, object], form: Format) -> str:
    return "message" if form.messages_key == "messages" and "messages" not in row else form.messages_key


def _prompt(value: Any) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": value}] if isinstance(value, str) else list(value)


def _messages(value: Any, where: str) -> list[Mapping[str, Any]]:
    right = isinstance(value, Sequence) and not isinstance(value, str)
    if not right or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in value):
        raise DataError(f"{where}: its messages are no list of mappings with role and content")
    return list(value)


def _end(chat: Chat) -> np.ndarray:
    """Return the token that ends a turn: of the model's end tokens the one that its template writes, else the first."""
    ends = chat.tokenizer.eos_ids
    if not ends:
        return np.zeros(0, np.int64)
    if chat.tokenizer.chat_template is not None:
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        rendered = chat.tokenizer.apply_chat_template(said, add_generation_prompt=False)
        written = [token for token in rendered.tolist() if token in ends]
        ends = tuple(written[-1:]) or ends
    return np.array(ends[:1], np.int64)
