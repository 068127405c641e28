"""What was stored comes back bit for bit, whatever happened to the file meanwhile."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import warnings
from collections.abc import Mapping

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import rlkit
from rlkit import CheckpointError, ConfigError, DataError, Sample, SamplingParams
from rlkit.rollouts import Replay, rollout
from rlkit.storage import TornLine, append, from_record, read, to_record
from rlkit.trajectory import Failure, Group, Trajectory, Turn, datums
from tests.properties import examples
from tests.rollouts.parts import Counted, RandomSampler
from tests.test_trajectory import trajectories


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


def equal(one, two):
    return fields(one) == fields(two)


@examples(100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(trajectories(), max_size=3), st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(tmp_path_factory, members, text):
    """Tokens, float32 logprobs and float64 rewards, and any text."""
    path = tmp_path_factory.mktemp("storage") / "groups.jsonl"
    members = [
        rlkit.trajectory.Trajectory(t.turns, tags={text: text}, messages=[{"role": "user", "content": text}])
        for t in members
    ]
    group = Group(members, failures=[Failure(text, "OSError", text)], env=text, number=3, step=9, index=1)
    append(path, [group])
    (found,) = read(path)
    assert equal(group, found)
    for s, t in zip(group.trajectories, found.trajectories, strict=True):
        pairs = zip(datums(s, 1.0, split="allow"), datums(t, 1.0, split="allow"), strict=True)
        assert all(a.tokens.tobytes() == b.tokens.tobytes() for a, b in pairs)


def odd():
    turns = [
        Turn(
            Sample([5], [6], [-1e-30], "length", temperature=0.7, top_p=0.9, top_k=5, version=3, min_p=0.1),
            float("nan"),
        ),
        Turn(Sample([5], [], []), -0.1 - 0.2, {"score": 1 / 3}, weight=0.3),
        Turn(Sample([5], [6], [-1.0]), rewards=(0.1, 0.2, float("nan"))),
        Turn(Sample([5], [6], [-1.0]), rewards=()),
    ]
    trajectory = Trajectory(
        turns,
        terminated=True,
        ended="terminated",
        env="e",
        index=4,
        seed=2**62,
        reduction="max",
        nonterminal_reward=0.1,
    )
    override = Trajectory(turns[:1], nonterminal_override=-0.5)
    return Group(
        [trajectory, override, Trajectory([])], env="e", failures=[Failure("e", "timeout", "late", "step", 2, 1)]
    )


def test_everything_comes_back(tmp_path):
    append(tmp_path / "a", [odd()])
    assert equal(odd(), next(read(tmp_path / "a")))


def test_a_line_can_be_read_by_people_and_is_linear(tmp_path):
    """Rewards and messages stand in it as they are; each prompt only as what it adds."""
    groups = asyncio.run(rollout(RandomSampler(), Counted, n=2, params=SamplingParams(max_tokens=5)))
    append(tmp_path / "a.jsonl", groups)
    (line,) = (tmp_path / "a.jsonl").read_text("utf-8").splitlines()
    record = json.loads(line)
    assert record["rewards"] == groups[0].rewards.tolist()
    assert record["trajectories"][0]["messages"][0]["role"] == "user"
    turns = record["trajectories"][0]["turns"]
    stored = sum(len(turn["prompt"]["added"]) + len(turn["tokens"]) for turn in turns)
    last = groups[0].trajectories[0].turns[-1]
    assert stored == last.prompt.size + last.tokens.size
    assert equal(groups[0], next(read(tmp_path / "a.jsonl")))


def test_a_torn_last_line_is_left_out_with_a_warning(tmp_path):
    """Cut anywhere; and the next append does not touch it."""
    path = tmp_path / "a.jsonl"
    append(path, [odd()])
    whole = path.read_bytes()
    for cut in [1, 2, 50, len(whole) // 2, len(whole) - 2]:
        path.write_bytes(whole + whole[:cut])
        with pytest.warns(TornLine, match=r"a\.jsonl:2: the line is incomplete"):
            assert len(list(read(path))) == 1
        with pytest.raises(DataError, match="incomplete"):
            list(read(path, strict=True))
        append(path, [odd(), odd()])
        with pytest.warns(TornLine, match=":2:"):
            assert all(equal(group, odd()) for group in read(path))
        with pytest.warns(TornLine):
            assert len(list(read(path))) == 3
    path.write_bytes(whole + whole[:-1])  # only the end of line is missing: nothing is lost
    append(path, [odd()])
    assert len(list(read(path))) == 3


def test_an_undecodable_line_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    append(path, [odd()])
    path.write_bytes(b"\xff\xfe\n" + b"[" * 100_000 + b"\n\n" + path.read_bytes())
    with pytest.warns(TornLine):
        assert len(list(read(path))) == 1


def _write(path, number):
    for _ in range(20):
        append(path, [Group([], number=number)])


def test_several_processes_append(tmp_path):
    path = tmp_path / "a.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, i)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers = [group.number for group in read(path)]
    assert sorted(numbers) == [0] * 20 + [1] * 20 + [2] * 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r | {"version": 5}, "version 5"),
        (lambda r: r | {"format": "other"}, "format"),
        (lambda r: [r], "format"),
        (lambda r: {k: v for k, v in r.items() if k != "env"}, "damaged: KeyError"),
        (lambda r: r | {"trajectories": [1]}, "damaged: TypeError"),
        (lambda r: r | {"env": 3}, r"Group\.env"),
        (lambda r: r | {"failures": [{"x": 1}]}, "damaged"),
        (lambda r: r | {"trajectories": [r["trajectories"][0] | {"turns": [{}]}]}, "damaged: KeyError"),
    ],
)
def test_what_is_no_group(tmp_path, change, message):
    record = to_record(odd())
    with pytest.raises(DataError, match=message):
        from_record(change(record))
    (tmp_path / "a").write_text(json.dumps(change(record)))
    with pytest.raises(DataError, match=r"a:1: .*"):
        list(read(tmp_path / "a"))


def test_a_prompt_that_keeps_more_than_there_was():
    record = to_record(odd())
    record["trajectories"][0]["turns"][0]["prompt"] = {"kept": 5, "added": []}
    with pytest.raises(DataError, match="kept"):
        from_record(record)


def test_files_that_can_not_be_used(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        list(read(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="cannot be written"):
        append(tmp_path, [odd()])
    with pytest.raises(ConfigError, match="path"):
        append("", [odd()])
    with pytest.raises(DataError, match=r"groups\[1\]"):
        append(tmp_path / "a", [odd(), 3])
    assert not (tmp_path / "a").exists()


def test_one_group_is_a_list_of_one(tmp_path):
    """What is no group is said to be that, and nothing is written or kept."""
    group = Group([], failures=[])
    replay = Replay(max_age=1)
    for take in (lambda groups: append(tmp_path / "one.jsonl", groups), replay.add):
        for wrong in (None, "groups", [group, 3], 3):
            with pytest.raises(DataError, match="groups"):
                take(wrong)
    assert not (tmp_path / "one.jsonl").exists()
    replay.add(group)
    assert len(replay) == append(tmp_path / "one.jsonl", group) == 1


def test_versions_of_tokens_come_back():
    turns = [Turn(Sample([5], [6, 7], [-1.0, -1.0], versions=[2, 3]))]
    record = json.loads(json.dumps(to_record(Group([Trajectory(turns)]))))
    assert from_record(record).trajectories[0].turns[0].sample.versions.tolist() == [2, 3]
