"""What was stored comes back bit for bit, whatever happened to the file meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs
import numpy as np
import pytest

from rlkit import CheckpointError, ConfigError, DataError, Sample
from rlkit.rollouts import Replay
from rlkit.storage import TornLine, append, from_record, read, to_record
from rlkit.trajectory import Failure, Group, Trajectory, Turn
from tests.each import for_each


def fields(value):
    """A value to the bit: objects as their fields, arrays as bytes, floats as text, since NaN differs from itself."""
    if attrs.has(type(value)):
        return {field.name: fields(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {name: fields(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [fields(each) for each in value]
    return repr(value) if isinstance(value, float) else value


def odd():
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "version": 3}
    turns = [
        Turn(Sample([0, 5], [6], [-1e-30], "length", **options), float("nan")),
        Turn(Sample([5], [], []), -0.1 - 0.2, {"score": 1 / 3}, weight=0.3),
        Turn(Sample([5], [6], [-1.0]), rewards=(0.1, 0.2, float("nan"))),
        Turn(Sample([5], [6], [-1.0]), rewards=()),
        Turn(Sample([5], [6, 7], [-1.0, -1.0], versions=[2, 3])),
    ]
    about = {"env": "e", "index": 4, "seed": 2**62, "reduction": "max", "nonterminal_reward": 0.1, "tags": {"ü": "\0"}}
    whole = Trajectory(turns, terminated=True, ended="terminated", **about)
    override = Trajectory(turns[:1], nonterminal_override=-0.5)
    failure = Failure("e", "timeout", "late", "step", 2, 1)
    return Group([whole, override, Trajectory([])], env="e", failures=[failure], number=3, step=9, index=1)


def test_everything_comes_back(tmp_path):
    """Values that are not JSON become text, keys that others add to a line are ignored."""
    append(tmp_path / "a", odd())
    (line,) = (tmp_path / "a").read_text().splitlines()
    record = json.loads(line)
    assert record["rewards"] == [None, -0.5, 0.0]  # for people who read the line
    record["trajectories"][0]["advantages"] = [0.5] * 5
    assert fields(from_record(record)) == fields(next(read(tmp_path / "a"))) == fields(odd())
    message = {"role": "user", "content": "\ud800", "a": np.float32(0.5), "b": [float("nan")], "c": {"d": object}}
    append(tmp_path / "b", Group([Trajectory([], messages=[message])]))
    (found,) = next(read(tmp_path / "b")).trajectories[0].messages
    assert found == message | {"a": 0.5, "b": ["NaN"], "c": {"d": "<class 'object'>"}}


def test_a_torn_last_line_is_left_out_with_a_warning(tmp_path):
    path = tmp_path / "a.jsonl"
    append(path, [odd()])
    whole = path.read_bytes()
    for torn in (whole[:1], whole[:50], whole[: len(whole) // 2], whole[:-2], b"\xff\xfe", b"[" * 100_000, b"NaN"):
        path.write_bytes(whole + b"\n" + torn)
        with pytest.warns(TornLine, match=r"a\.jsonl:3: the line is incomplete"):
            assert len(list(read(path))) == 1
        with pytest.raises(DataError, match="incomplete"):
            list(read(path, strict=True))
        append(path, [odd(), odd()])
        with pytest.warns(TornLine, match=":3:"):
            assert [fields(group) for group in read(path)] == [fields(odd())] * 3
    path.write_bytes(whole + whole[:-1])  # only the end of line is missing: nothing is lost
    append(path, [odd()])
    assert len(list(read(path))) == 3


@for_each(
    ("change", "message"),
    [
        (lambda r: r | {"version": 5}, "version 5"),
        (lambda r: r | {"format": "other"}, "format"),
        (lambda r: [r], "format"),
        (lambda r: {k: v for k, v in r.items() if k != "env"}, "damaged: KeyError"),
        (lambda r: r | {"trajectories": [1]}, "damaged: TypeError"),
        (lambda r: r | {"env": 3}, r"Group\.env"),
        (lambda r: r | {"failures": [{"x": 1}]}, "damaged"),
        (lambda r: r["trajectories"][0]["turns"][0].update(prompt={"kept": 1, "added": []}) or r, "kept"),
        (lambda r: r["trajectories"][0]["turns"].append({}) or r, "damaged: KeyError"),
    ],
)
def test_what_is_no_group(tmp_path, change, message):
    (tmp_path / "a").write_text(json.dumps(change(to_record(odd()))))
    with pytest.raises(DataError, match=f"a:1.*{message}"):
        list(read(tmp_path / "a"))


def test_files_that_can_not_be_used(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        list(read(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="cannot be written"):
        append(tmp_path, [odd()])
    with pytest.raises(ConfigError, match="path"):
        append("", [odd()])


def test_one_group_is_a_list_of_one(tmp_path):
    group, replay = Group([]), Replay(max_age=1)
    for take in (lambda groups: append(tmp_path / "one.jsonl", groups), replay.add):
        for wrong in (None, "groups", [group, 3], 3):
            with pytest.raises(DataError, match="groups"):
                take(wrong)
    assert not (tmp_path / "one.jsonl").exists()
    replay.add(group)
    assert len(replay) == append(tmp_path / "one.jsonl", group) == 1
