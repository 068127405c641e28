"""Rows of a file or of a data set on a hub: mappings, read at once."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rlkit import _check
from rlkit._interaction import Message
from rlkit.backends.hub import hub_trouble
from rlkit.chat import Chat
from rlkit.errors import ConfigError, DataError
from rlkit.recipes.settings import Format
from rlkit.trajectory import Trajectory, Turn, datums
from rlkit.types import Datum, Sample

RAW = "raw"  # the role of a prompt that no template renders
_KINDS = (".jsonl", ".json", ".parquet")
Row: TypeAlias = Mapping[str, object]


def raw_prompt(text: str) -> list[Message]:
    """Return a prompt that a run sends unchanged, independent of the template of its other prompts."""
    return [{"role": RAW, "content": text}]


def read(path: str | None, *, where: str, split: str = "train", subset: str | None = None) -> Sequence[Row]:
    """Return the rows.

    Args:
        path: a .jsonl, .json (a list) or .parquet file; a folder of such files that are named after splits, as
            ``train.jsonl`` or ``test-00000-of-00002.parquet``; or, if there is nothing of that name, an id of a data
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
        files = _of_split(place, split, subset, where)
        return [row for file in files for row in _file(file, where)]
    if place.suffix in _KINDS:
        if not place.is_file():
            raise ConfigError(where, f"is {path!r}", "a file that exists")
        return _rows_of_split(place, split, where)
    if place.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        expected = "a file that ends in " + ", ".join(_KINDS) + ", a folder, or a data set's name such as openai/gsm8k"
        raise ConfigError(where, f"is {path!r}", expected)
    return _hub(path, split, subset, where)


def _rows_of_split(place: Path, split: str, where: str) -> Sequence[Row]:
    """Return the rows of a file whose field ``split`` has that value; all if the file is named after the split."""
    rows = _file(place, where)
    if any("split" in row for row in rows):
        chosen = [row for row in rows if row.get("split", "train") == split]
        if chosen:
            return chosen
    elif split == "train" or _named(place, split):
        return rows
    known = sorted({str(row["split"]) for row in rows if "split" in row}) or ["train"]
    why = "any other split needs a separate file or folder, or rows with a field named split"
    raise ConfigError(f"{where.rpartition('.')[0]}.split", f"is {split!r}", " or ".join(known), why)


def _of_split(folder: Path, split: str, subset: str | None, where: str) -> list[Path]:
    """Return the files of a split, in the order of their names."""
    inner = folder / subset if subset and (folder / subset).is_dir() else folder
    places = [inner, inner / "data"] if (inner / "data").is_dir() else [inner]
    files = sorted(file for place in places for file in place.iterdir() if file.suffix in _KINDS)
    of_split = [file for file in files if _named(file, split)]
    if not of_split:
        names = ", ".join(file.name for file in files[:8]) or "no such files"
        what, expected = f"the folder {str(inner)!r} has {names}", f"{split}.jsonl, or .json or .parquet"
        raise ConfigError(f"{where.rpartition('.')[0]}.split", what, expected)
    return of_split


def _named(file: Path, split: str) -> bool:
    """Return whether a file is named after the split: ``test.jsonl``, ``test-00000-of-00002.parquet``."""
    return split in re.split(r"[-_.]", file.stem)


def _file(file: Path, where: str) -> list[Row]:
    try:
        rows: list[Row] = {".jsonl": _lines, ".json": _list, ".parquet": _table}[file.suffix](file)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(where, f"{file} is empty", "at least one row")
    for i, row in enumerate(rows):
        _check.require(isinstance(row, Mapping), f"{file}: row {i}", row, "a mapping", error=DataError)
    return rows


def field(row: Row, key: str, where: str) -> object:
    """Return ``row[key]``, or if the key is missing and has dots, ``row["a"]["b"]`` for "a.b".

    Raises:
        DataError: the row has none, naming those that it has.
    """
    value = row.get(key)
    if value is None and "." in key:
        value = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise DataError(where, f"has the fields {sorted(map(str, row))}", f"a field {key!r}")
    return value


def _lines(file: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(file.read_text("utf-8").split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
    return rows


def _list(file: Path) -> list[Row]:
    rows = json.loads(file.read_text("utf-8"))
    if not isinstance(rows, list):
        raise ValueError("it holds no list")  # noqa: TRY004  # reported as an unreadable file
    return rows


def _table(file: Path) -> list[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{file}: a parquet file needs pyarrow: pip install pyarrow") from error
    rows: list[Row] = parquet.read_table(file).to_pylist()
    return rows


def _hub(name: str, split: str, subset: str | None, where: str) -> Sequence[Row]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        text = f"{where}: {name!r} is not a file; a data set on a hub needs the package datasets: pip install datasets"
        raise ConfigError(text) from error
    cache = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    trouble = "" if cache.is_dir() or Path(name).is_dir() else hub_trouble()
    if trouble:
        expected = "a file, or a network: HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy"
        raise ConfigError(where, f"the data set {name!r} is not on this machine, and {trouble}", expected)
    try:
        rows: Sequence[Row] = datasets.load_dataset(name, subset, split=split, trust_remote_code=False)
    except Exception as error:  # the package raises errors of many kinds
        if "trust_remote_code" in str(error) or "scripts are no longer supported" in str(error):
            text = f"{where}: the data set {name!r} brings its own code, which rlkit never runs"
            raise ConfigError(f"{text}; expected one of files, such as parquet or JSON") from error
        text = f"{where}: cannot load the data set {name!r} (split {split!r}) from the hub, which needs a network"
        raise ConfigError(f"{text}: {error}") from error
    return rows


def each_row(given: Sequence[Row], where: str) -> Iterator[tuple[Row, str]]:
    """Yield each row, and its name for messages."""
    for i in range(len(given)):  # a data set of a hub is read row by row
        yield given[i], f"{where}: row {i}"


def demonstrations(given: Sequence[Row], form: Format, chat: Chat, where: str) -> list[list[Datum]]:
    """Return the datums of each row: prompts as the chat renders them, and every assistant message is learnt.

    Args:
        given: rows with a prompt and a response, under the keys of ``form``, or with a list of messages.

    Raises:
        DataError: a row lacks a field, or has nothing to learn from.
    """
    data = []
    for row, name in each_row(given, where):
        key = _messages_key(row, form)
        if key in row:
            messages = _messages(row[key], name)
        else:
            prompt, answer = field(row, form.prompt_key, name), field(row, form.response_key, name)
            messages = [*_prompt(prompt), {"role": "assistant", "content": str(answer)}]
        data.append(conversation_of(chat, messages, name))
    return data


def preferences(given: Sequence[Row], form: Format, chat: Chat, where: str) -> list[list[Datum]]:
    """Return the two datums of each row, chosen and rejected.

    Raises:
        DataError: as for ``demonstrations``.
    """
    pairs = []
    for row, name in each_row(given, where):
        prompt = _prompt(field(row, form.prompt_key, name))
        pair = []
        for key in (form.chosen_key, form.rejected_key):
            answer = {"role": "assistant", "content": str(field(row, key, name))}
            pair += conversation_of(chat, [*prompt, answer], name)
        pairs.append(pair)
    return pairs


def texts(given: Sequence[Row], form: Format, chat: Chat, where: str) -> list[list[Datum]]:
    """Return the datum of each row's text, without a template: every token but the first is learnt.

    Raises:
        DataError: a row lacks the field, or its text has less than two tokens.
    """
    data = []
    for row, name in each_row(given, where):
        tokens = np.asarray(chat.tokenizer.encode(str(field(row, form.prompt_key, name))))
        if tokens.size < 2:
            raise DataError(f"{name}: its text has {tokens.size} tokens; training needs at least two")
        data.append([Datum(tokens, np.arange(tokens.size) > 0)])
    return data


def conversation_of(chat: Chat, messages: Sequence[Row], where: str) -> list[Datum]:
    """Return datums that learn every assistant message, each with the end token that a sampler would stop at.

    Raises:
        DataError: there is no assistant message, or the conversation begins with one.
    """
    cuts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not cuts or cuts[0] == 0:
        what = "has no message of the assistant" if not cuts else "begins with a message of the assistant"
        raise DataError(f"{where}: the conversation {what}, so it has nothing to learn")
    end = chat.end
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


def check_rows(given: Sequence[Row], form: Format, data: str, where: str) -> None:
    """Raise DataError where a row lacks a field that ``data``, of a recipe, will be made from."""
    keys = {
        "pairs": (form.prompt_key, form.chosen_key, form.rejected_key),
        "texts": (form.prompt_key,),
    }.get(data, (form.prompt_key, form.response_key))
    for row, name in each_row(given, where):
        if data in ("pairs", "texts") or _messages_key(row, form) not in row:
            for key in keys:
                field(row, key, name)


def _messages_key(row: Row, form: Format) -> str:
    return "message" if form.messages_key == "messages" and "messages" not in row else form.messages_key


def _prompt(value: Any) -> list[Row]:
    return [{"role": "user", "content": value}] if isinstance(value, str) else list(value)


def _messages(value: object, where: str) -> list[Row]:
    messages: list[Any] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [None]
    if not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
        raise DataError(f"{where}: its messages are not a list of mappings with role and content")
    return messages
