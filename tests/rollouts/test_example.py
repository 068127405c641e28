"""The example of several turns learns."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("jinja2")


def test_a_game_of_several_turns(tmp_path):
    """It answers with digits after a few steps; what it played can be read back."""
    from rlkit.storage import read
    from tests.test_examples import load

    means, found = load("multi_turn").train(9, keep=str(tmp_path / "kept.jsonl"))
    assert max(means[-3:]) > means[0] + 0.3
    assert found.scores["digit"].mean > means[0] + 0.3
    groups = list(read(tmp_path / "kept.jsonl"))
    assert [group.step for group in groups] == [step for step in range(9) for _ in range(4)]
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    assert sum(turn.metrics["digit"] for turn in turns[-100:]) > 50
