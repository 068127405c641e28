"""Files of a run that were damaged or made by somebody else: a typed error or the checkpoint before, nothing else."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit import Sample
from rlkit.backends import saves
from rlkit.runs import Retention, Run, records
from rlkit.tracking import read_metrics
from rlkit.trajectory import Group, Trajectory, Turn
from tests.each import for_each

FILES = ["run.json", "config.json", "metrics.jsonl", "trajectories.jsonl"]
GROUP = Group([Trajectory([Turn(Sample([65], [66, 67], [-0.5, -0.5]), 1.0)], tags={"a": 1})])
DEEP = "[" * 20_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps with three checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with Run(folder, seed=0, trackers=("jsonl",), config={"a": 1.5}, retention=Retention(last=3)) as run:
        policy, noise, kept = run.connect("toy"), run.rng("noise"), run.keep("kept", {"x": np.arange(3.0)})
        for _ in run.steps(4):
            noise.normal()
            kept["x"] += 1
            run.log({"train/loss": 0.5})
            run.log_trajectories([GROUP], advantages=[1.0])
            run.checkpoint(policy, metrics={"score": 1.0})
    return folder


def opened(folder):
    """What opening the run, and reading it in every other way, comes to: a step, or the error's class."""
    found, said = [], ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Run(folder, trackers=("jsonl",), config={"a": 1.5}) as run:
                run.connect("toy")
                run.rng("noise").normal()
                run.keep("kept", {})
                run.log({"train/loss": 0.5})
                found.append(run.step)
        except rlkit.RlkitError as error:
            found.append(type(error))
            said = str(error)
        assert len(said) < 2000
        for read in (records, read_metrics, rlkit.report.write, lambda f: list(rlkit.storage.read(f / FILES[3]))):
            try:
                read(folder)
            except rlkit.RlkitError as error:
                found.append(type(error))
    return found


WORDS = [b"NaN", b"1e999", b"-1", b"null", b"[]", b"{}", b'"a"', b"9" * 5000, b"true", b"\\ud800", DEEP.encode()]


def mutate(data, kind, draws):
    """One mutation of a file's bytes."""
    at, length = int(draws.integers(max(1, len(data)))), int(draws.integers(1, 40))
    before, part, after = data[:at], data[at : at + length], data[at + length :]
    if kind.startswith("value"):  # another one for a number
        digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()] or [0]
        at = digits[int(draws.integers(len(digits)))]
        return data[:at] + WORDS[int(draws.integers(len(WORDS)))] + data[at + 1 :]
    return {
        "flip": before + bytes(byte ^ (1 << int(draws.integers(8))) for byte in part[:1]) + part[1:] + after,
        "cut": before,
        "zero": before + bytes(len(part)) + after,
        "drop": before + after,
        "twice": before + part + part + after,
        "noise": before + draws.bytes(length) + part + after,
    }[kind]


@pytest.mark.parametrize("kind", ["flip", "cut", "zero", "drop", "twice", "noise", "value", "value again"])
def test_mutations(tmp_path, whole, kind):
    """One to a file, all files of the run in turn: it goes on from a checkpoint, or says what is wrong."""
    draws = np.random.default_rng([*kind.encode()])
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    names = [name for name in names if not name.startswith(("lock", "report")) or draws.random() < 0.1]
    for i, name in enumerate(names):
        folder = tmp_path / str(i)
        shutil.copytree(whole, folder)
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(mutate(data, kind, draws))
        began = time.process_time()
        found = opened(folder)
        assert found[0] in (4, 3, 2, rlkit.CheckpointError), (name, found)
        if name.startswith(("checkpoints", "policies")) and (folder / name).read_bytes() != data:
            assert found[0] in (4, 3, 2), (name, found)  # there are others
        assert time.process_time() - began < 20
        shutil.rmtree(folder)


HOSTILE_STATES = {
    "step": [-1, 1.5, "4", None, True, 10**30],
    "seed": [-1, "0", 1.5, [0]],
    "policies": [[], {"policy": 3}, {"policy": "../../etc"}, {"policy": "policies/../../x"}, {"policy": "a\0b/c"}],
    "kept": [[], {"kept": 3}, {"rng/noise": {"state": {"state": -1}}}, {"kept": {"__array__": "O", "data": ""}}],
    "metrics": [[], {"score": {"__float__": "x"}}, {"score": "high"}, {"score": {"__array__": "<f8"}}],
    "logged": [[], {"Jsonl": 3}, {"Jsonl": {"metrics.jsonl": -1}}, {"Jsonl": {"metrics.jsonl": 10**30}}],
}


@for_each(("name", "value"), [(n, v) for n, values in HOSTILE_STATES.items() for v in values])
def test_checkpoints_with_the_right_checksum(tmp_path_factory, whole, name, value):
    """Made by another program: each field of another kind, or out of its range."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    shutil.copytree(whole, folder)
    newest = records(folder)[-1].path
    state = json.loads((newest / "state.json").read_text())
    shutil.rmtree(newest)
    fields = {key: state[key] for key in ("backend", "step", "policies", "kept", "metrics", "seed", "logged")}
    for key in ("kept", "policies"):
        if key == name and isinstance(value, dict):
            value = {**fields[key], **value}
    saves.write(folder / "checkpoints", newest.name[:13], lambda _: {**fields, name: value})
    found = opened(folder)
    assert found[0] in (4, 3, rlkit.CheckpointError, rlkit.ConfigError), found


@for_each(
    "key, value", [("version", "a"), ("version", None), ("seed", "x"), ("seed", "-1"), ("requests", -1), ("m", 3)]
)
def test_policies_with_the_right_checksum(tmp_path_factory, whole, key, value):
    """What is wrong in one is an error that names the checkpoint before, or harmless."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    shutil.copytree(whole, folder)
    path = folder / records(folder)[-1].policies["policy"]
    state = json.loads((path / "state.json").read_text())
    data = (path / "toy.npz").read_bytes()
    shutil.rmtree(path)
    content = {**{k: v for k, v in state.items() if k not in ("format", "sha256", "state_sha256")}, key: value}
    made = saves.write(path.parent, "step-x", lambda at: (at / "toy.npz").write_bytes(data) and content)
    made.rename(path)
    assert opened(folder)[0] in (4, rlkit.CheckpointError)


class Bomb:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("canary",)


def packed(**arrays):
    data = io.BytesIO()
    np.savez(data, **arrays)
    return data.getvalue()


def zipped(name, size):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({size},), }}".ljust(117) + "\n"
        file.writestr(name, b"\x93NUMPY\x01\x00v\x00" + header.encode() + b"\0" * 10**6)
    return data.getvalue()


def malicious():
    """Name -> bytes, or a function that makes what is no file, for policies, checkpoints and runs."""
    bomb = pickle.dumps(Bomb())
    arrays = {
        "pickle": bomb,
        "object array": packed(value=np.array([Bomb()], dtype=object)),
        "object moments": packed(value=np.zeros(3), m=np.array([Bomb()])),
        "npy": b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117)
        + b"\n"
        + bomb,
        "huge shape": zipped("value.npy", 10**15),
        "larger than it is": zipped("value.npy", 10**9),
        "path in a zip": zipped("../../value.npy", 3),
        "absolute in a zip": zipped("/tmp/rlkit-value.npy", 3),  # noqa: S108
        "torch": zipped("archive/data.pkl", 3),
        "empty": b"",
        "text": b"value",
        "gzip": b"\x1f\x8b\x08" + bytes(100),
        "nan": packed(value=np.full(3, np.nan)),
        "strings": packed(value=np.array(["a"])),
        "no arrays": packed(),
    }
    states = {
        "deep": DEEP.encode(),
        "deep object": b'{"a":' * 20_000,
        "pickle": bomb,
        "constant": b'{"format": 1, "sha256": {}, "x": Infinity}',
        "digits": b'{"format": 1, "sha256": {}, "x": ' + b"9" * 10_000 + b"}",
        "outside": b'{"format": 1, "sha256": {"../../../../../etc/passwd": "0"}}',
        "null byte": b'{"format": 1, "sha256": {"a\\u0000b": "0"}}',
        "no text": b"\xff\xfe\x00",
        "surrogate": b'{"format": 1, "sha256": {"\\ud800": "0"}}',
        "list": b"[1]",
        "pipe": os.mkfifo,
        "device": lambda path: os.symlink("/dev/zero", path),  # noqa: PTH211
        "loop": lambda path: os.symlink(path, path),  # noqa: PTH211
    }
    found = {}
    for kind, cases in (("array", arrays), ("state", states)):
        found |= {f"{kind}: {name}": content for name, content in cases.items()}
    return found


@pytest.mark.timeout(120)
@for_each("case", malicious())
def test_malicious_files(tmp_path_factory, whole, monkeypatch, case):
    """As a policy's arrays, a checkpoint's state, run.json or config.json: nothing runs, a typed error, at once."""
    resource = pytest.importorskip("resource")
    tmp_path = tmp_path_factory.mktemp("malicious")
    monkeypatch.chdir(tmp_path)
    kind, content = case.partition(":")[0], malicious()[case]

    def put(path):
        path.unlink(missing_ok=True)
        content(path) if callable(content) else path.write_bytes(content)

    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "array":
        made = saves.write(tmp_path, "made", lambda at: put(at / "toy.npz") or {"backend": "toy", "version": 1})
        for option in ("resume_from", "init_from"):
            with pytest.raises(rlkit.CheckpointError):
                rlkit.connect("toy", **{option: str(made)})
        with pytest.raises(rlkit.CheckpointError):
            rlkit.sampler("toy", path=str(made))
    else:
        shutil.copytree(whole, tmp_path / "run")
        put(records(tmp_path / "run")[-1].path / "state.json")
        assert opened(tmp_path / "run")[0] == 3
        put(tmp_path / "run/run.json")
        assert opened(tmp_path / "run")[0] in (3, rlkit.CheckpointError)  # the seed is the checkpoint's
        (tmp_path / "run/run.json").unlink()
        put(tmp_path / "run/config.json")
        assert opened(tmp_path / "run")[0] == 3
        with pytest.raises(rlkit.CheckpointError):
            put(tmp_path / "state.json") or saves.read(tmp_path, backend=None)
    assert not (tmp_path / "canary").exists()
    assert time.process_time() - began < 20.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_a_checkpoint_is_read_back_when_it_is_written(tmp_path, monkeypatch):
    """A file that a disk lost is an error of the step that saved it, not of the program that resumes from it."""

    def save_and_lose(self, name, **options):
        future = save(self, name, **options)
        next(p for p in Path(future.result()).iterdir() if p.suffix == ".npz").write_bytes(b"")
        return future

    with Run(tmp_path / "run", seed=0) as run:
        policy = run.connect("toy")
        save = type(policy).save
        for _ in run.steps(1):
            monkeypatch.setattr(type(policy), "save", save_and_lose)
            with pytest.raises(rlkit.CheckpointError, match="damaged"):
                run.checkpoint(policy)
            monkeypatch.undo()
