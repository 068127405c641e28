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


def test_hosted_learns_and_goes_on_after_a_lost_step(capsys):
    """The example for the hosted service, over a service in this process that loses the answer to one step."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from rlkit.testing import FakeTinker
    from rlkit.testing.faults import Fault

    example = load("hosted")
    with FakeTinker(seed=0) as fake:
        fake.inject(Fault("410", "retrieve_future", operation="optim_step", skip=6))
        options = {"model": "toy", "base_url": fake.base_url, "api_key": fake.api_key, "seed": 0}
        means = example.run(options, steps=15, save_every=5, learning_rate=0.05)
        assert not fake.doubled()
    assert len(means) == 15
    assert means[-1] > means[0] + 0.2
    assert "going on from tinker://" in capsys.readouterr().out
