"""examples/agent.py: an agent written with an SDK is trained as it is, and gets better."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit.tracking import read_metrics
from tests.examples.programs import FOLDER, load, refused

pytest.importorskip("torch")
pytest.importorskip("omegaconf")
pytest.importorskip("jinja2")
pytest.importorskip("uvicorn", reason="needs the extra gateway")
pytest.importorskip("openai")


def train(folder, *overrides):
    program = load("agent")
    return program.train(rlkit.config.load(program.Settings, overrides=[f"folder={folder}", *overrides]))


@pytest.mark.timeout(900)  # half a minute of a processor
def test_it_learns_where_the_key_is(tmp_path):
    """From what the drawers say alone; and a run that was cut goes on."""
    means = train(tmp_path / "run", "learning_rate=0.15", "max_steps=3")
    with pytest.warns(RuntimeWarning, match="max_steps"):
        means += train(tmp_path / "run", "learning_rate=0.15", "max_steps=10")
    assert len(means) == 10
    assert np.mean(means[-3:]) > means[0] + 0.2
    rows = read_metrics(tmp_path / "run")
    assert [row["metrics"]["env/drawers/episodes"] + row["metrics"]["env/drawers/failed"] for row in rows] == [32] * 10


def test_as_processes(tmp_path):
    """The same agent, each episode in a process of its own; nothing fails."""
    (mean,) = train(tmp_path / "run", "process=true", "max_steps=1", "n=2", "warm_up=10")
    assert mean >= 0.0


def test_the_agent_knows_nothing_of_rlkit():
    text = (FOLDER / "agent_program.py").read_text()
    assert "import rlkit" not in text
    assert "from rlkit" not in text
    assert len((FOLDER / "agent.py").read_text().splitlines()) < 150


def test_mistakes_and_help(capsys):
    refused(load("agent"), ["n=0"], r"^agent.py: .*Plan.n")
    refused(load("agent"), ["max_step=0"], "did you mean 'max_steps'")
    load("agent").main(["--help"])
    assert "python examples/agent.py process=true" in capsys.readouterr().out
