"""Warnings name the user's line."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import pytest

from rlkit.backends.trainer import Worker
from rlkit.storage import TornLine, read


def here():
    """Return the caller's line number."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_the_users_line_is_named(tmp_path):
    """Whatever lies between in rlkit, a generator among it."""
    (tmp_path / "a.jsonl").write_text("{\n")
    line = here() + 2
    with pytest.warns(TornLine) as said:
        list(read(tmp_path / "a.jsonl"))
    assert [(x.filename, x.lineno, x.category) for x in said] == [(__file__, line, TornLine)]


def test_a_worker_names_rlkits_line(tmp_path):
    """No line of the user's is in its stack, and one of the module threading says nothing."""
    (tmp_path / "a.jsonl").write_text("{\n")
    worker = Worker("test")
    with pytest.warns(TornLine) as said:
        worker.submit(partial(list, read(tmp_path / "a.jsonl"))).result()
    assert [Path(x.filename).name for x in said] == ["storage.py"]
    worker.close()
