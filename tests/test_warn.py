"""Warnings name the user's line, also those of a thread that the user did not start."""

from __future__ import annotations

import inspect
import warnings

import pytest

from rlkit._warn import users_line, warn
from rlkit.backends.toy import ToyBackend
from rlkit.backends.trainer import Worker
from rlkit.storage import TornLine, read


def here():
    """The line of whoever calls it."""
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


def test_a_worker_names_the_line_that_started_it():
    """Not its own, nor the standard library's."""
    line = here() + 1
    worker = Worker("test")
    with pytest.warns(RuntimeWarning, match="slow") as said:
        worker.submit(lambda: warn("slow", RuntimeWarning)).result()
    assert [(x.filename, x.lineno) for x in said] == [(__file__, line)]
    worker.close()


def test_a_backend_names_the_line_that_connected():
    """Its worker starts deep inside of the call."""
    line = here() + 1
    with ToyBackend(seed=0) as policy:
        named = policy._worker.submit(users_line).result()
    assert (named.file, named.number, named.module) == (__file__, line, __name__)


def test_a_line_is_warned_once():
    """As ``warnings.warn`` does by default."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("again")
    assert len(said) == 1
