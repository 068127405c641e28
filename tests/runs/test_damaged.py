"""Files of a run that were damaged or made by somebody else: a typed error or the checkpoint before, nothing else."""

from __future__ import annotations

import contextlib
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
from rlkit.backends import saves
from rlkit.runs import Retention, Run, records
from rlkit.tracking import read_metrics
from tests.each import for_each

DEEP = "[" * 20_000
MAGIC = b"\x93NUMPY\x01\x00v\x00"


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
            run.checkpoint(policy, metrics={"score": 1.0})
    return folder


def opened(folder):
    """What opening the run comes to: a step, or the error's class. Other readers raise errors of rlkit's at most."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Run(folder, trackers=("jsonl",), config={"a": 1.5}) as run:
                run.connect("toy")
                run.rng("noise").normal()
                run.keep("kept", {})
                run.log({"train/loss": 0.5})
                found = run.step
        except rlkit.RlkitError as error:
            found = type(error) if len(str(error)) < 2000 else "too long"
        for read in (records, read_metrics, rlkit.report.write):
            with contextlib.suppress(rlkit.RlkitError):
                read(folder)
    return found


HOSTILE = {
    "step": [-1, 1.5, "4", None, True, 10**30],
    "seed": [-1, "0", 1.5, [0]],
    "policies": [[], {"policy": 3}, {"policy": "../../etc"}, {"policy": "policies/../../x"}, {"policy": "a\0b/c"}],
    "kept": [[], {"kept": 3}, {"rng/noise": {"state": {"state": -1}}}, {"kept": {"__array__": "O", "data": ""}}],
    "metrics": [[], {"score": {"__float__": "x"}}, {"score": "high"}, {"score": {"__array__": "<f8"}}],
    "logged": [[], {"Jsonl": 3}, {"Jsonl": {"metrics.jsonl": -1}}, {"Jsonl": {"metrics.jsonl": 10**30}}],
    "policy/version": ["a", None],
    "policy/seed": ["x", "-1"],
    "policy/requests": [-1],
    "policy/m": [3],
}


@for_each(("name", "value"), [(name, value) for name, values in HOSTILE.items() for value in values])
def test_the_right_checksum(tmp_path_factory, whole, name, value):
    """Made by another program: a field of a checkpoint or of its policy is of another kind, or out of its range."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    shutil.copytree(whole, folder)
    newest, (policy, _, name) = records(folder)[-1], name.rpartition("/")
    path = folder / newest.policies["policy"] if policy else newest.path
    state = json.loads((path / "state.json").read_text())
    files = {file.name: file.read_bytes() for file in path.iterdir() if file.name in state["sha256"]}
    shutil.rmtree(path)
    if name in ("kept", "policies") and isinstance(value, dict):
        value = {**state[name], **value}
    content = {key: x for key, x in state.items() if key not in ("format", "sha256", "state_sha256")}

    def fill(at):
        for file, data in files.items():
            (at / file).write_bytes(data)
        return {**content, name: value}

    saves.write(path.parent, "x", fill).rename(path)
    allowed = (4, rlkit.CheckpointError, *(() if policy else (3, rlkit.ConfigError)))
    assert opened(folder) in allowed


class Bomb:
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
        file.writestr(name, MAGIC + header.encode() + b"\0" * 10**6)
    return data.getvalue()


def malicious():
    """Name -> bytes, or a function that makes what is no file, for policies, checkpoints and runs."""
    bomb = pickle.dumps(Bomb())
    arrays = {
        "pickle": bomb,
        "object array": packed(value=np.array([Bomb()], dtype=object)),
        "object moments": packed(value=np.zeros(3), m=np.array([Bomb()])),
        "npy": MAGIC + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n" + bomb,
        "huge shape": zipped("value.npy", 10**15),
        "larger than it is": zipped("value.npy", 10**9),
        "path in a zip": zipped("../../value.npy", 3),
        "empty": b"",
        "nan": packed(value=np.full(3, np.nan)),
        "strings": packed(value=np.array(["a"])),
        "no arrays": packed(),
    }
    states = {
        "deep": DEEP.encode(),
        "pickle": bomb,
        "constant": b'{"format": 1, "sha256": {}, "x": Infinity}',
        "digits": b'{"format": 1, "sha256": {}, "x": ' + b"9" * 10_000 + b"}",
        "outside": b'{"format": 1, "sha256": {"../../../../../etc/passwd": "0"}}',
        "null byte": b'{"format": 1, "sha256": {"a\\u0000b": "0"}}',
        "surrogate": b'{"format": 1, "sha256": {"\\ud800": "0"}}',
        "list": b"[1]",
        "pipe": os.mkfifo,
        "device": lambda path: os.symlink("/dev/zero", path),  # noqa: PTH211
        "loop": lambda path: os.symlink(path, path),  # noqa: PTH211
    }
    cases = (("array", arrays), ("state", states))
    return {f"{kind}: {name}": content for kind, contents in cases for name, content in contents.items()}


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
        assert opened(tmp_path / "run") == 3
        put(tmp_path / "run/run.json")
        assert opened(tmp_path / "run") in (3, rlkit.CheckpointError)  # the seed is the checkpoint's
        (tmp_path / "run/run.json").unlink()
        put(tmp_path / "run/config.json")
        assert opened(tmp_path / "run") == 3
        with pytest.raises(rlkit.CheckpointError):
            put(tmp_path / "state.json") or saves.read(tmp_path, backend=None)
    assert not (tmp_path / "canary").exists()
    assert time.process_time() - began < 20.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_a_checkpoint_is_read_back_when_it_is_written(tmp_path, monkeypatch):
    """A file that a disk lost is an error of the step that saved it, not of the program that resumes from it."""
    with Run(tmp_path / "run", seed=0) as run:
        policy = run.connect("toy")
        saved = policy.save("lost")
        (Path(saved.result()) / "toy.npz").write_bytes(b"")
        monkeypatch.setattr(policy, "save", lambda name: saved)
        with pytest.raises(rlkit.CheckpointError, match="damaged"):
            run.checkpoint(policy)
