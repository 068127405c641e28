"""The examples run to their end and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_algorithm_learns():
    """Each of the algorithms raises the reward on the toy."""
    example = load("algorithms")
    for name in example.ALGORITHMS:
        means = example.run(name, 10)
        assert means[-1] > means[0] + 0.2, name
