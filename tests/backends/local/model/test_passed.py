"""Self-checks that passed are not made again, until something changes on which they depend."""

from __future__ import annotations

import gc
import json
import os
import shutil
from unittest import mock

import pytest

import rlkit

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from rlkit.backends.local.model import base, probe  # noqa: E402

CHECKS = ("trainable_linears", "causal")


@pytest.fixture
def load(tiny, tmp_path, monkeypatch):
    """Loads a model anew; which checks were made for it, or for what the model became."""
    monkeypatch.setattr(probe, "checks_folder", lambda: tmp_path / "checks")
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")

    def load(dtype="float32"):
        gc.collect()  # the base of before
        with mock.patch.multiple(base, **{name: mock.Mock(wraps=getattr(base, name)) for name in CHECKS}):
            made = base.load_base(str(folder), dtype, "cpu")
            assert "lm_head" in made.linear
            return [name for name in CHECKS if getattr(base, name).called]

    load.folder, load.notes = folder, tmp_path / "checks"
    return load


def test_what_passed_is_not_checked_again(load):
    assert load() == [*CHECKS]
    assert load() == []
    (file,) = load.notes.iterdir()
    assert json.loads(file.read_text("utf-8"))["passed"].keys() == {"linear", "causal"}


def test_whatever_a_check_depends_on_has_it_made_again(load, monkeypatch):
    """Each part of the key, once; and back again nothing is checked."""
    load()
    changes = {
        "rlkit": lambda patch: patch.setattr(probe, "_source", lambda: "other"),
        "versions": lambda patch: patch.setattr(probe, "_versions", lambda: ["0.0"]),  # the library looks at torch's
        "processor": lambda patch: patch.setattr(probe, "_processor", lambda: ["other"]),
        "instructions": lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other"),
        "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
        "libraries": lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
        "code": lambda patch: patch.setattr(
            transformers.models.llama.modeling_llama.LlamaMLP,
            "forward",
            lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)),
        ),
    }
    for name, change in changes.items():
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            assert load() == [*CHECKS], name
    assert {torch.__version__, transformers.__version__} < set(probe._versions())
    assert load("bfloat16") == [*CHECKS]
    assert load() == []
    stat = (load.folder / "config.json").stat()
    os.utime(load.folder / "config.json", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert load() == [*CHECKS]
    model = mock.Mock(modules=list)
    keys = [probe.key_of(model, [("a", 1, 2)], "float32", torch.device(x)) for x in ("cpu", "mps")]
    assert keys[0] != keys[1]
    model.config._commit_hash = None
    assert probe.key_of(model, (), "float32", torch.device("cpu")) is None  # a hub id of which nothing is known


def test_what_failed_is_never_remembered(load):
    """It is refused, and checked at the next time."""
    for _ in range(2):
        gc.collect()
        with mock.patch.object(base, "causal", return_value=False), pytest.raises(rlkit.ConfigError, match="causal"):
            base.load_base(str(load.folder), "float32", "cpu")
    assert load() == [*CHECKS]


def test_what_cannot_be_trusted_is_ignored(load, monkeypatch):
    """Files that are cut, of another form, of another key, or of another user."""
    load()
    (file,) = load.notes.iterdir()
    good = file.read_text("utf-8")
    record = json.loads(good)
    for text in (
        "",
        good[:-20],
        "[]",
        "null",
        json.dumps({**record, "key": {**record["key"], "threads": 99}}),
        json.dumps({**record, "passed": 3}),
        json.dumps({**record, "passed": {"linear": [1], "causal": 1}}),
        json.dumps({**record, "passed": {"linear": ["no.such.module"]}}),
    ):
        file.write_text(text, "utf-8")
        assert load() == [*CHECKS], text
    assert load() == []
    if hasattr(os, "getuid"):
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        assert load() == [*CHECKS]
    monkeypatch.setattr(probe, "checks_folder", lambda: load.folder / "config.json" / "no folder")
    assert load() == [*CHECKS]  # and nothing is raised where nothing can be written
