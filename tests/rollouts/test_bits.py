"""What every kind of environment gave before the loop was rewritten, to the bit, however many episodes are played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("gem")
pytest.importorskip("reasoning_gym")
pytest.importorskip("transformers")

from tests.rollouts import bits

EXPECTED = json.loads(Path(__file__).with_name("bits.json").read_text())


@pytest.mark.parametrize("concurrency", [1, 4, 128])
def test_rollouts(concurrency):
    found = bits.play(concurrency)
    assert found.keys() == EXPECTED["rollouts"].keys()
    assert [name for name, each in found.items() if each != EXPECTED["rollouts"][name]] == []


def test_batches_ahead():
    """Also those of a run that was resumed in between."""
    for found in bits.ahead():
        assert found == EXPECTED["ahead"]


@pytest.mark.parametrize("part", ["seeds", "order", "prompts"])
def test_functions_of_their_arguments(part):
    assert json.loads(json.dumps(getattr(bits, part)())) == EXPECTED[part]
