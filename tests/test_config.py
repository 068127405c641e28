"""Settings from files and overrides."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

import rlkit
from rlkit.config import describe, dump, load
from tests.each import for_each

pytest.importorskip("omegaconf", reason="needs the extra config")


@attrs.frozen
class Lora:
    """An adapter.

    Args:
        rank: of the matrices,
            both of them.
    """

    rank: int = 32

    def __attrs_post_init__(self):
        if self.rank < 1:
            raise rlkit.ConfigError("rank: got a rank below 1")


@attrs.frozen
class Settings:
    """Of a run.

    Args:
        rate, decay: numbers.
        mode: one of two.
    """

    needed: str
    lora: Lora = Lora()
    rate: float = 1e-4
    decay: float = 0.0
    mode: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = (1,)
    extra: dict[str, float] = attrs.field(factory=dict)
    maybe: int | None = None
    either: float | str = 1.0
    flag: bool = False
    folder: Path = Path("runs")
    anything: Any = None


def written(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_file_then_overrides(tmp_path):
    path = written(tmp_path, "needed: x\nlora: {rank: 4}\nrate: 1e-3\nsizes: [1, 2]\nextra: {a: 1}\ndecay: ${rate}\n")
    found = load(Settings, path, ["lora.rank=8", "maybe=3", "either=auto", "flag=true", "mode=b", "folder=x/y"])
    assert (found.lora.rank, found.rate, found.decay, found.sizes) == (8, 1e-3, 1e-3, (1, 2))
    assert (found.extra, found.maybe, found.either, found.flag) == ({"a": 1.0}, 3, "auto", True)
    assert (found.mode, found.folder) == ("b", Path("x/y"))


def test_overrides_reach_into_lists_and_mappings(tmp_path):
    path = written(tmp_path, "needed: x\nsizes: [1, 2, 3]\nextra: {a: 1, b/c: 2}\nanything: [{rank: 1}, {rank: 2}]\n")
    found = load(Settings, path, ["sizes.0=7", "sizes[2]=9", "anything.1.rank=5", "extra.b/c=4", "extra={d: 5}"])
    assert (found.sizes, found.anything) == ((7, 2, 9), [{"rank": 1}, {"rank": 5}])
    assert found.extra == {"a": 1.0, "b/c": 4.0, "d": 5.0}
    assert load(Settings, path, ["sizes=[4]", "decay=${sizes.0}"]).sizes == (4,)


def test_what_is_dumped_is_read_back(tmp_path):
    from omegaconf import OmegaConf

    found = load(Settings, None, ["needed=x", "sizes=[3,4]", "lora.rank=2", "maybe=null"])
    again = load(Settings, written(tmp_path, OmegaConf.to_yaml(dump(found))))
    assert again == found


def test_variables_fill_settings_of_every_type(tmp_path, monkeypatch):
    """By default and by variable, direct, by reference and in parts; what may be text stays text."""
    monkeypatch.delenv("RLKIT_UNSET", raising=False)
    variables = {"RATE": "1e-6", "RANK": "8", "ONE": "1", "LIST": "[1, 2]", "NULL": "null"}
    for name, text in variables.items():
        monkeypatch.setenv(f"RLKIT_{name}", text)
    cases = {
        "rate: ${oc.env:RLKIT_UNSET,1e-6}": ("rate", 1e-6),
        "rate: ${oc.env:RLKIT_RATE}": ("rate", 1e-6),
        "rate: ${oc.env:RLKIT_RANK,2}": ("rate", 8.0),
        "rate: ${decay}\ndecay: ${oc.env:RLKIT_RATE}": ("rate", 1e-6),
        "rate: 1e-${oc.env:RLKIT_RANK}": ("rate", 1e-8),
        "lora: {rank: '${oc.env:RLKIT_RANK,4}'}": ("lora", Lora(8)),
        "flag: ${oc.env:RLKIT_UNSET,no}": ("flag", False),
        "flag: ${oc.env:RLKIT_ONE}": ("flag", True),
        "flag: ${oc.env:RLKIT_UNSET,0}": ("flag", False),
        "maybe: ${oc.env:RLKIT_NULL}": ("maybe", None),
        "maybe: ${oc.env:RLKIT_RANK}": ("maybe", 8),
        "either: ${oc.env:RLKIT_RATE}": ("either", 1e-6),
        "either: ${oc.env:RLKIT_UNSET,auto}": ("either", "auto"),
        "sizes: ${oc.env:RLKIT_LIST}": ("sizes", (1, 2)),
        "sizes: ['${oc.env:RLKIT_RANK}', 3]": ("sizes", (8, 3)),
        "needed: ${oc.env:RLKIT_UNSET,1e-6}": ("needed", "1e-06"),  # as OmegaConf writes a default
        "folder: ${oc.env:RLKIT_RANK}": ("folder", Path("8")),
        "mode: ${oc.env:RLKIT_UNSET,b}": ("mode", "b"),
        "anything: {a: ['${oc.env:RLKIT_RANK}']}": ("anything", {"a": ["8"]}),
        "anything: ${oc.decode:${oc.env:RLKIT_RANK}}": ("anything", 8),
    }
    for text, (name, expected) in cases.items():
        found = getattr(load(Settings, written(tmp_path, f"{text}\n"), [] if "needed" in text else ["needed=x"]), name)
        assert found == expected, text
        assert type(found) is type(expected), text
    assert load(Settings, None, ["needed=x", "rate=${oc.env:RLKIT_RATE}"]).rate == 1e-6
    assert type(load(Settings, written(tmp_path, "needed: x\nanything: ['${needed}']")).anything[0]) is str


def test_what_a_variable_cannot_fill_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RLKIT_WORD", "fast")
    monkeypatch.setenv("RLKIT_ZERO", "0")
    monkeypatch.delenv("RLKIT_UNSET", raising=False)
    word = "${oc.env:RLKIT_WORD}"
    for text, message in {
        f"rate: {word}": f"rate: is 'fast'; expected a value of type float (written as {word})",
        f"maybe: {word}": f"maybe: is 'fast'; expected a value of type int (written as {word})",
        f"mode: {word}": f"mode: is 'fast'; expected one of 'a', 'b' (written as {word})",
        "rate: ${needed}": "rate: is 'x'; expected a value of type float (written as ${needed})",
        "lora: {rank: '${oc.env:RLKIT_ZERO}'}": "(rank is written as ${oc.env:RLKIT_ZERO})",
        "rate: ${oc.env:RLKIT_UNSET}": "rate: Environment variable 'RLKIT_UNSET' not found",
    }.items():
        with pytest.raises(rlkit.ConfigError) as caught:
            load(Settings, written(tmp_path, f"needed: x\n{text}\n"))
        assert str(caught.value).endswith(message), text


REFUSED = {
    "rtae: 1": "^rtae: unknown setting; did you mean 'rate'[?] There are: needed, lora",
    "lora: {rnak: 1}": "^lora.rnak: unknown setting; did you mean 'rank'",
    "extra: {a: b}": "^extra.a: is 'b'; expected a value of type float",
    "needed: 3": "^needed: is 3; expected a value of type str",
    "rate: '8'": "^rate: is '8'; expected a value of type float",
    "rate: true": "^rate: is True",
    "lora: 3": "^lora: got 3 [(]int[)]; expected a mapping",
    "lora: {rank: 0}": "^lora: rank: got a rank below 1",
    "mode: c": "^mode: is 'c'; expected one of 'a', 'b'",
    "sizes: [1, two]": r"^sizes\[1\]: is 'two'",
    "sizes: '12'": "^sizes: got '12' [(]str[)]; expected a list",
    "extra: [1]": "^extra: got .*; expected a mapping",
    "maybe: 1.5": "^maybe: is 1.5; expected a value of type int",
    "either: [1]": "^either: .*; expected a value of type str",
    "rate: ${nothing}": "rate: Interpolation key 'nothing' not found",
    "rate: ???": "rate: Missing mandatory value",
    "rate: 1\nrate: 2": "cannot be read as settings: line 3, column 1: found duplicate key rate",
    "rate: ${x": "cannot be read",
    "rate: !!python/object/apply:os.system ['touch /tmp/never']": "cannot be read",
    "rate: " + "1" * 10_000: "cannot be read",
    "rate: 0x" + "f" * 10_000: "rate: is larger than any float",
    "\x00": "cannot be read",
    "a: &a [1]\nb: [" + "*a, " * 200 + "1]": "50 levels, 100 aliases or 1000 references, the limits",
    "rate: " + "[" * 50_000: "50 levels",
    "rate: '" + "${rate}" * 2000 + "'": "1000 references",
    "rate: " + "${" * 900: "cannot be read",
    "rate: " + "x" * 1_100_000: "more than 1000000 bytes",
    "x" * 900_000 + ": 1": "unknown setting|cannot be read",
    "maybe: " + "y" * 900_000: "^maybe: is 'yyy",
}
OVERRIDES = {
    "rate": "^override",
    3: "^override",
    "q" * 100_000: "^override",
    "rate='": "^rate: cannot be set: line 1",
    "rate=!!python/object/apply:os.system [id]": "^rate: cannot be set.*constructor",
    "rate=\ud800": "^rate: can",
    "rate=" + "[" * 5000: "^rate: cannot be set: more than 50 levels",
    ".".join("a" * 3000) + "=1": "cannot be set|^a",
    "sizes.5=1": "^sizes.5: cannot be set",
    "anything.x.rank=1": "^anything.x.rank: cannot be set",
}


CASES = [*((x, None, y) for x, y in REFUSED.items()), *(("", *x) for x in OVERRIDES.items())]


@for_each(("text", "override", "match"), [case for case in CASES if len(f"{case[:2]}") < 500])
def test_what_is_refused(tmp_path, text, override, match):
    refuse(tmp_path, text, override, match)


@for_each(("text", "override", "match"), [case for case in CASES if len(f"{case[:2]}") >= 500])
def test_long_texts_are_refused(tmp_path, text, override, match):
    refuse(tmp_path, text, override, match)


def refuse(tmp_path, text, override, match):
    began = time.process_time()
    first = "" if "needed:" in text else "needed: x\nanything: [1]\nsizes: [1, 2]\n" if override else "needed: x\n"
    with pytest.raises(rlkit.ConfigError, match=match) as caught:
        load(Settings, written(tmp_path, first + text), [] if override is None else [override])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500  # never a whole file
    assert time.process_time() - began < 10.0


def test_files_that_are_refused(tmp_path):
    """One that is missing, a folder, a named pipe (which has no end), a list, and one without a required key."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "pipe", written(tmp_path, "- 1")):
        with pytest.raises(rlkit.ConfigError, match="cannot be read as settings"):
            load(Settings, path)
    with pytest.raises(rlkit.ConfigError, match="^needed: required setting is missing"):
        load(Settings)
    with pytest.raises(rlkit.ConfigError, match="attrs"):
        load(dict)


def test_as_deep_as_settings_are(tmp_path):
    """Brackets within texts count too, and forty of them are no trouble."""
    path = written(tmp_path, "needed: '" + "[" * 40 + "'\nanything: " + "[" * 9 + "1" + "]" * 9)
    assert load(Settings, path).needed == "[" * 40


def test_each_setting_is_described_in_a_line():
    lines = {line.split()[0]: line for line in describe(Settings).splitlines()}
    assert lines["lora.rank"].endswith("of the matrices, both of them.")
    assert "float = 0.0001" in lines["rate"]
    assert lines["decay"].endswith("numbers.")
    assert set(lines) >= {"needed", "sizes", "extra"}


def test_words_that_yaml_reads_as_booleans():
    @attrs.frozen
    class Words:
        template: Literal["game", "no"] = "game"
        power: Literal["on", "off"] = "off"
        mode: Literal["a", "b"] = "a"

    assert load(Words, overrides=["template=no", "power=on"]) == Words(template="no", power="on")
    with pytest.raises(rlkit.ConfigError, match="mode: is False; expected one of 'a', 'b'"):
        load(Words, overrides=["mode=no"])
