"""Rows of a file or of a data set on a hub: mappings, read at once."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit._interaction import Message
from rlkit._runtime import missing
from rlkit.backends.hub import hub_trouble
from rlkit.chat import Chat, Conversation
from rlkit.chat.messages import FIELDS, is_list, read_messages, read_text, read_tools
from rlkit.errors import ConfigError, DataError
from rlkit.recipes.settings import Format
from rlkit.trajectory import Trajectory, Turn, datums
from rlkit.types import Datum, Sample

__all__ = ["Example", "fit", "get_field", "raw_prompt", "read_examples", "read_prompt", "read_rows", "with_system"]

logger = logging.getLogger("rlkit.recipes")
RAW = "raw"  # the role of a prompt that no template renders
_KINDS = (".jsonl", ".json", ".parquet")
Row: TypeAlias = Mapping[str, object]


def raw_prompt(text: str) -> list[Message]:
    """Return a prompt that a run sends unchanged, independent of the template of its other prompts."""
    return [{"role": RAW, "content": text}]


def read_rows(path: str | None, *, where: str, split: str = "train", subset: str | None = None) -> Sequence[Row]:
    """Return the rows.

    Args:
        path: a .jsonl, .json (a list) or .parquet file; a folder of such files that are named after splits, as
            ``train.jsonl`` or ``test-00000-of-00002.parquet``; or, if no file has that name, the id of a data
            set on a hub, such as "openai/gsm8k", which needs the package datasets and network access.
        where: the setting that names it, for messages.
        split: which rows. Of a file those whose field ``split`` has that value, or all if it is named after the split;
            "train" is all of a file that has no such field.
        subset: of a data set on a hub; of a folder, the folder in it.

    Raises:
        ConfigError: the file does not exist, or it cannot be read.
        DataError: a row is not a mapping.
    """
    if not path:
        raise ConfigError(where, "is not given", "a file, a folder, or a data set's name")
    place = Path(path)
    if place.is_dir():
        files = _find_split_files(place, split, subset, where)
        return [row for file in files for row in _read_file(file, where)]
    if place.suffix in _KINDS:
        if not place.is_file():
            raise ConfigError(where, f"is {path!r}", "a file that exists")
        return _select_split(place, split, where)
    if place.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        expected = "a file that ends in " + ", ".join(_KINDS) + ", a folder, or a data set's name such as openai/gsm8k"
        raise ConfigError(where, f"is {path!r}", expected)
    return _load_from_hub(path, split, subset, where)


def _select_split(place: Path, split: str, where: str) -> Sequence[Row]:
    """Return the rows of a file whose field ``split`` has that value; all if the file is named after the split."""
    rows = _read_file(place, where)
    if any("split" in row for row in rows):
        chosen = [row for row in rows if row.get("split", "train") == split]
        if chosen:
            return chosen
    elif split == "train" or _is_named_after(place, split):
        return rows
    known = sorted({str(row["split"]) for row in rows if "split" in row}) or ["train"]
    why = "any other split needs a separate file or folder, or rows with a field named split"
    raise ConfigError(where.removesuffix("path") + "split", f"is {split!r}", " or ".join(known), why)


def _find_split_files(folder: Path, split: str, subset: str | None, where: str) -> list[Path]:
    """Return the files of a split, in the order of their names."""
    inner = folder / subset if subset and (folder / subset).is_dir() else folder
    places = [inner, inner / "data"] if (inner / "data").is_dir() else [inner]
    files = sorted(file for place in places for file in place.iterdir() if file.suffix in _KINDS)
    of_split = [file for file in files if _is_named_after(file, split)]
    if not of_split:
        names = ", ".join(file.name for file in files[:8]) or "no such files"
        what, expected = f"the folder {str(inner)!r} has {names}", f"{split}.jsonl, {split}.json or {split}.parquet"
        raise ConfigError(where.removesuffix("path") + "split", what, expected)
    return of_split


def _is_named_after(file: Path, split: str) -> bool:
    """Return whether a file is named after the split: ``test.jsonl``, ``test-00000-of-00002.parquet``."""
    return split in re.split(r"[-_.]", file.stem)


def _read_file(file: Path, where: str) -> list[Row]:
    read: dict[str, Callable[[Path], list[Row]]] = {".jsonl": _read_lines, ".json": _read_list}
    try:
        rows = read.get(file.suffix, _read_parquet)(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(where, f"{file} is empty", "at least one row")
    return [row for row, _ in each_row(rows, str(file))]


def _read_lines(file: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(file.read_bytes().decode("utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
    return rows


def _read_list(file: Path) -> list[Row]:
    rows = json.loads(file.read_bytes().decode("utf-8-sig"))
    if not isinstance(rows, list):
        raise ValueError("expected a list of rows")  # noqa: TRY004  # reported as an unreadable file
    return rows


def _read_parquet(file: Path) -> list[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise missing(f"{file}: a parquet file", "pyarrow", "data") from error
    rows: list[Row] = parquet.read_table(file).to_pylist()
    return rows


def get_field(row: Row, key: str, where: str) -> object:
    """Return ``row[key]``, or if the key is missing and has dots, ``row["a"]["b"]`` for "a.b".

    Raises:
        DataError: the field is missing or null; the message names the fields of the row.
    """
    value = _get(row, key)
    if value is None:
        why = "the keys of format, such as prompt_key, name others"
        raise DataError(where, f"has the fields {sorted(map(str, row))}", f"a field {key!r} that is not null", why)
    return value


def _get(row: Row, key: str) -> object:
    """Return the value of a key, which may have dots; None if there is none."""
    value: object = row
    for part in [key] if key in row else key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _load_from_hub(name: str, split: str, subset: str | None, where: str) -> Sequence[Row]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise missing(f"{where}: {name!r} is not a file; a data set on a hub", "datasets", "data") from error
    cache = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    trouble = "" if cache.is_dir() or Path(name).is_dir() else hub_trouble()
    if trouble:
        expected = "a file, or a network: HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy"
        raise ConfigError(where, f"the data set {name!r} is not on this machine, and {trouble}", expected)
    try:
        rows: Sequence[Row] = datasets.load_dataset(name, subset, split=split, trust_remote_code=False)
    except Exception as error:  # the package raises errors of many kinds
        if "trust_remote_code" in str(error) or "scripts are no longer supported" in str(error):
            what = f"the data set {name!r} brings its own code, which rlkit never runs"
            raise ConfigError(where, what, "a data set of files, such as parquet or JSON") from error
        text = f"{where}: cannot load the data set {name!r} (split {split!r}) from the hub, which needs a network"
        raise ConfigError(f"{text}: {error}") from error
    return rows


def each_row(given: Sequence[Row], where: str) -> Iterator[tuple[Row, str]]:
    """Yield each row, and its name for messages."""
    for i, row in enumerate(given):
        name = f"{where}: row {i}"
        _check.require(isinstance(row, Mapping), name, row, "a mapping", error=DataError)
        yield row, name


@attrs.frozen
class Example:
    """One row to learn from, read and checked, without a tokenizer.

    Attributes:
        where: the row, for messages.
        prompt: the messages before the first that is learnt.
        answers: what is learnt after it: one conversation, of which each assistant's message is learnt, or the chosen
            and the rejected answer; empty for a text.
        tools: function schemas for the chat template.
        text: all that is learnt, without a template.
    """

    where: str
    prompt: Sequence[Message] = ()
    answers: Sequence[Sequence[Message]] = ()
    tools: Sequence[Message] = ()
    text: str = ""

    def datums(self, chat: Chat) -> list[Datum]:
        """Return the datums: of a pair two, chosen and rejected; of a conversation one for each part that continues.

        The tokens of an answer are those that the chat template writes, with the token that a sampler would stop at.

        Raises:
            DataError: the chat template refuses the messages, or a text has less than two tokens.
        """
        if not self.answers:
            tokens = np.asarray(chat.tokenizer.encode(self.text))
            if tokens.size < 2:
                raise DataError(f"{self.where}: its text has {tokens.size} tokens; training needs at least two")
            return [Datum(tokens, np.arange(tokens.size) > 0)]
        try:
            start = chat.start(list(self.prompt), self.tools)
            if len(self.answers) == 1:
                return _make_demonstrations(start, self.answers[0])
            return _make_pair(start, self.answers)
        except DataError as error:
            raise DataError(f"{self.where}: {error}") from error


def _make_pair(conversation: Conversation, answers: Sequence[Sequence[Message]]) -> list[Datum]:
    """Return a datum for each answer to one prompt; what the template puts before both of them belongs to it."""
    chosen, rejected = (_make_answer(conversation.fork(), answer, lead=False) for (answer,) in answers)
    if np.array_equal(chosen.tokens[~chosen.mask], rejected.tokens[~rejected.mask]):
        return [chosen, rejected]
    return [_make_answer(conversation.fork(), answer, lead=True) for (answer,) in answers]


def _make_answer(conversation: Conversation, answer: Message, *, lead: bool) -> Datum:
    tokens = conversation.demonstrate(answer, lead=lead)
    whole = np.concatenate([conversation.prompt, tokens])
    return Datum(whole, np.arange(whole.size) >= conversation.prompt.size)


def _make_demonstrations(conversation: Conversation, messages: Sequence[Message]) -> list[Datum]:
    """Return the datums of the assistant's messages, which continue the conversation."""
    turns = []
    cuts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
        prompt = conversation.prompt
        tokens = conversation.demonstrate(messages[cut], None if following is None else messages[cut + 1 : following])
        turns.append(Turn(Sample(prompt, tokens, np.zeros(tokens.size))))
    return [Datum(datum.tokens, datum.mask) for datum in datums(Trajectory(turns), split="allow")]


def read_examples(given: Sequence[Row], kind: str, form: Format | None = None, where: str = "data") -> list[Example]:
    """Return what is to be learnt from rows of one of the usual forms.

    Args:
        given: the rows.
        kind: "demonstrations": rows with ``messages``, of which every answer of the assistant is learnt, or with a
            ``prompt`` and a ``response`` (or ``completion``), each text or messages, of which the response is learnt.
            "pairs": ``chosen`` and ``rejected``, each an answer (text or a message) after ``prompt``, or a whole
            conversation. "texts": texts under the key of prompts.
        form: the keys, if they are others. ``tools``, function schemas, are rendered with a row's messages.
        where: the file, for messages.

    Raises:
        DataError: naming the row and the field, a row has another form.

    >>> row = {"chosen": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
    ...        "rejected": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "5"}]}
    >>> (pair,) = read_examples([row], "pairs")
    >>> [message["content"] for message in pair.prompt], [answer[0]["content"] for answer in pair.answers]
    (['2 + 2?'], ['4', '5'])
    """
    form = Format() if form is None else form
    kinds = {"pairs": _read_pair, "texts": _read_text, "demonstrations": _read_demonstration}
    kinds["mixed"] = _read_demonstration
    read = kinds[_check.choice("kind", kind, tuple(kinds))]
    examples, unread = [], set[str]()
    for row, name in each_row(given, where):
        example, keys = read(row, form, name)
        unread |= unread_fields(row, keys, sum(map(list, example.answers), list(example.prompt)))
        examples.append(example)
    name_unread(unread, where)
    return examples


def fit(
    examples: Sequence[Example], chat: Chat, max_length: int, leave_out: bool = False, setting: str = ""
) -> list[list[Datum]]:
    """Return the datums of each example that fits the policy's context.

    Args:
        examples: from ``read_examples``.
        chat: of the policy.
        max_length: the policy's, in tokens.
        leave_out: whether longer ones are left out, which is logged with a count; else they are an error.
        setting: the name of that choice, for the message.

    Raises:
        DataError: as for ``Example.datums``; an example is longer, or all are.
    """
    found, long = list[list[Datum]](), list[str]()
    for example in examples:
        data = example.datums(chat)
        longest = max(len(datum) for datum in data)
        if longest <= max_length:
            found.append(data)
        else:
            long.append(f"{example.where} ({longest} tokens)")
    if not long:
        return found
    names = ", ".join(long[:5]) + (", ..." if len(long) > 5 else "")
    what = f"{len(long)} of {len(examples)} rows are longer than the policy's context of {max_length} tokens: {names}"
    if not leave_out or not found:
        raise DataError(f"{what}; shorten them" + (f", or set {setting} to leave them out" if setting else ""))
    logger.warning("left out: %s", what)
    return found


def unread_fields(row: Row, keys: Iterable[str | None], messages: Sequence[Message] = ()) -> set[str]:
    """Return the fields of a row, and of its messages, that are not read; a key with dots reads its first field."""
    read = {"split"} | {part for key in keys if key for part in (key, key.partition(".")[0])}
    inner = {f"{name} of messages" for message in messages for name in message.keys() - set(FIELDS)}
    return {str(key) for key in row.keys() - read} | inner


def name_unread(fields: set[str], where: str) -> None:
    """Log the fields that are not read."""
    if fields:
        logger.warning("%s: not read: the fields %s", where, ", ".join(sorted(fields)))


def _read_demonstration(row: Row, form: Format, where: str) -> tuple[Example, list[str | None]]:
    key, answer_key = form.messages_key, form.response_key
    if key == "messages" and key not in row:
        key = "message"
    if answer_key == "response" and _get(row, answer_key) is None and _get(row, "completion") is not None:
        answer_key = "completion"
    if _get(row, key) is not None:
        messages = read_messages(_get(row, key), f"{where}: {key}")
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
        if not first:
            what = "begins with a" if messages and messages[0]["role"] == "assistant" else "has no"
            why = "put a question before it, or leave the row out"
            raise DataError(f"{where}: {key}", f"{what} message of the assistant", "a question and its answer", why)
        prompt, answer, keys = messages[:first], messages[first:], [key]
    elif _get(row, form.prompt_key) is None and _get(row, answer_key) is None:
        expected = f"a field {form.messages_key!r}, or {form.prompt_key!r} and {answer_key!r}"
        why = "format.messages_key, prompt_key and response_key name others"
        raise DataError(where, f"has the fields {sorted(map(str, row))}", expected, why)
    else:
        prompt = read_prompt(get_field(row, form.prompt_key, where), f"{where}: {form.prompt_key}")
        key, keys = answer_key, [form.prompt_key, answer_key]
        answer = _read_said(get_field(row, key, where), f"{where}: {key}", "assistant")
        if not any(message["role"] == "assistant" for message in answer):
            raise DataError(f"{where}: {key}", "has no message of the assistant", "an answer to learn")
    _check_learnt(answer, f"{where}: {key}")
    example = Example(where, with_system(prompt, row, form, where), (answer,), _read_row_tools(row, form, where))
    return example, [*keys, form.tools_key, form.system_prompt_key]


def with_system(prompt: Sequence[Message], row: Row, form: Format, where: str) -> list[Message]:
    """Return a prompt with the row's own system prompt, if the format names a key for one and the prompt has none."""
    key = form.system_prompt_key
    if key is None or prompt[0]["role"] == "system":
        return list(prompt)
    return [{"role": "system", "content": read_text(get_field(row, key, where), f"{where}: {key}")}, *prompt]


def _read_pair(row: Row, form: Format, where: str) -> tuple[Example, list[str | None]]:
    names = form.chosen_key, form.rejected_key
    sides = [_read_said(get_field(row, key, where), f"{where}: {key}", "assistant") for key in names]
    whole = [side[:-1] for side in sides if side[0]["role"] != "assistant"]
    if len(whole) == 1:
        raise DataError(where, "has one answer with its prompt and one without", "both in the same form")
    given = _get(row, form.prompt_key) if whole else get_field(row, form.prompt_key, where)
    prompt = whole[0] if given is None else read_prompt(given, f"{where}: {form.prompt_key}")
    for key, (*before, answer) in zip(names, sides, strict=True):
        name, why = f"{where}: {key}", "the answers of a pair may differ only in the last message"
        if answer["role"] != "assistant":
            raise DataError(name, f"ends with the role {answer['role']!r}", "an answer of the assistant at the end")
        if whole:
            if [*map(_normalize, before)] != [*map(_normalize, whole[0])]:
                raise DataError(name, f"differs from {names[0]} before its last message", "one conversation", why)
            _check_prompt(before, prompt, isinstance(given, str), name)
        elif before:
            raise DataError(name, f"has {len(before) + 1} messages", "one answer", why)
        _check_learnt([answer], name)
    if _normalize(sides[0][-1]) == _normalize(sides[1][-1]):
        raise DataError(f"{where}: {names[1]}", f"is the same as {names[0]}", "another answer", "leave the row out")
    prompt = with_system(whole[0] if whole else prompt, row, form, where)
    example = Example(where, prompt, [side[-1:] for side in sides], _read_row_tools(row, form, where))
    return example, [form.prompt_key, *names, form.tools_key, form.system_prompt_key]


def _check_prompt(said: Sequence[Message], prompt: Sequence[Message], is_text: bool, where: str) -> None:
    """Raise DataError unless a conversation continues the row's prompt: a text, or messages."""
    asked = [message["content"].strip() for message in said if message["role"] == "user"]
    if is_text and prompt[0]["content"].strip() not in (asked[:1] + asked[-1:]):
        raise DataError(where, "does not contain the row's prompt as a message of the user", "a conversation with it")
    if not is_text and [*map(_normalize, prompt)] != [*map(_normalize, said)]:
        raise DataError(where, "does not begin with the row's prompt", "a conversation that begins with it")


def _normalize(message: Message) -> list[object]:
    """Return what a template writes of a message: ids and fields that are not known may differ."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [message["role"], message["content"].strip(), message.get("reasoning_content"), calls]


def _read_text(row: Row, form: Format, where: str) -> tuple[Example, list[str | None]]:
    text = read_text(get_field(row, form.prompt_key, where), f"{where}: {form.prompt_key}")
    return Example(where, text=text), [form.prompt_key]


def _check_learnt(messages: Sequence[Message], where: str) -> None:
    """Raise DataError for an answer from which nothing but its end would be learnt."""
    for message in messages:
        nothing = not message["content"].strip() and not message.keys() & {"tool_calls", "reasoning_content"}
        if message["role"] == "assistant" and nothing:
            raise DataError(where, "has an empty answer", "text to learn", "leave the row out")


def read_prompt(value: object, where: str) -> list[Message]:
    """Return a prompt: text of the user, or messages."""
    messages = _read_said(value, where, "user")
    if messages[-1]["role"] == "assistant":
        raise DataError(where, "ends with a message of the assistant", "messages that an answer follows")
    return messages


def _read_said(value: object, where: str, role: str) -> list[Message]:
    """Return messages: text of that role, one message, or a list of them."""
    if isinstance(value, str):
        return [{"role": role, "content": _check_text(value, where)}]
    if isinstance(value, Mapping) and "role" in value:
        value = [value]
    if not is_list(value):
        why = "write numbers as text"
        raise DataError(where, f"got {_check.describe(value)}", "text, a message, or a list of messages", why)
    messages = read_messages(value, where)
    if not messages:
        raise DataError(where, "has no messages", "at least one")
    return messages


def _check_text(value: str, where: str) -> str:
    """Return a text. Raises DataError: it is the JSON text of messages, which would be learnt as it is."""
    found: object = None
    if value.lstrip().startswith(("[", "{")) and '"role"' in value:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(value)
    if any(isinstance(each, Mapping) and "role" in each for each in (found if is_list(found) else [found])):
        raise DataError(where, f"got {_check.describe(value)}", "messages", "this is their JSON text; parse it first")
    return read_text(value, where)


def _read_row_tools(row: Row, form: Format, where: str) -> list[Message]:
    tools = _get(row, form.tools_key)
    return [] if tools is None else read_tools(tools, f"{where}: {form.tools_key}")
