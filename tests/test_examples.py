"""The examples run to their end and do what they say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
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
    from rlkit.testing import FakeTinker, Fault

    example = load("hosted")
    with FakeTinker(seed=0) as fake:
        fake.inject(Fault("410", "retrieve_future", operation="optim_step", skip=6))
        options = {"model": "toy", "base_url": fake.base_url, "api_key": fake.api_key, "seed": 0}
        means = example.run(options, steps=15, save_every=5, learning_rate=0.05)
        assert not fake.repeated_operations()
    assert len(means) == 15
    assert means[-1] > means[0] + 0.2
    assert "going on from tinker://" in capsys.readouterr().out


@pytest.mark.parametrize(("lag", "in_flight"), [(0, False), (2, False), (2, True)])
def test_async_grpo_learns(lag, in_flight):
    """On-policy, two steps behind, and at most two with what runs updated."""
    import rlkit

    with rlkit.connect("toy", seed=0) as policy:
        means = load("async_grpo").train(policy, steps=12, lag=lag, rate=0.05, in_flight=in_flight)
    assert len(means) == 12
    assert np.mean(means[-3:]) > means[0] + 0.3


def test_custom_loss_learns_everywhere(capsys):
    """By name, composed, and on Tinker; what it says of mistakes names them."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from rlkit import losses

    example = load("custom_loss")
    try:
        example.main()
    finally:
        del losses.registry["smooth"]
    said = capsys.readouterr().out
    gains = re.findall(r"reward (\S+) -> (\S+),", said)
    assert len(gains) == 3
    assert all(float(last) > float(first) + 0.3 for first, last in gains)
    assert "lacks 'sampling_logprobs'" in said
    assert "config['widht']" in said
    assert "kind='client'" in said


def test_custom_env_learns():
    """The maze, which wants the sign to be read at each of three doors, on mazes that it has not seen."""
    pytest.importorskip("jinja2", reason="needs the extra chat")
    means, found = load("custom_env").train(6)
    assert means[0] < 1.0
    assert means[-1] > 2.0
    assert found.scores["maze"].mean > 2.0
