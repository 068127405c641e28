"""A run in a notebook."""

from __future__ import annotations

import base64
import re
import sys
import types

import pytest

from rlkit import CheckpointError, ConfigError
from rlkit.report import Display, Live, live
from rlkit.tracking import Jsonl, MultiTracker, Tracker

HOSTILE = "<script>alert(1)</script>$\\bad{"


@pytest.fixture
def shown(monkeypatch):
    """Stands in for IPython.display: what was shown, in order."""
    found = []

    class HTML(str):
        __slots__ = ()

    class Handle:
        def update(self, value):
            found.append(value)

    def display(value, *, display_id):
        assert display_id
        found.append(value)
        return Handle()

    module = types.ModuleType("IPython.display")
    module.HTML, module.display = HTML, display
    package = types.ModuleType("IPython")
    package.version_info = (9, 0)  # matplotlib asks for it when it is imported
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return found


def pictures(html):
    return [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', html)]


def test_a_run_shows_its_numbers_and_curves(tmp_path):
    pytest.importorskip("matplotlib")
    tracker = Jsonl(tmp_path)
    for step in range(5):
        tracker.log({"env/sums/reward": step / 4, "time/rollout": 1.0, "time/step": 2.0, "train/entropy": 0.5}, step)
    html = Display(tmp_path)._repr_html_()
    assert "5 steps" in html
    assert "reward 1" in html
    (picture,) = pictures(html)
    assert picture.startswith(b"\x89PNG")
    assert repr(Display(tmp_path)) == f"Display({str(tmp_path)!r}, 5 steps)"


def test_nothing_logged_yet(tmp_path):
    Jsonl(tmp_path)
    assert "nothing logged yet" in Display(tmp_path)._repr_html_()
    with pytest.raises(CheckpointError):
        Display(tmp_path / "none")


def test_hostile_names_are_text(tmp_path):
    folder = tmp_path / "<b>bold"
    tracker = Jsonl(folder)
    tracker.log({HOSTILE: 1.0, f"env/{HOSTILE.replace('/', '')}/reward": 1.0, "_hidden": 2.0}, 0)
    html = Display(folder)._repr_html_()
    assert "<script" not in html
    assert "<b>bold" not in html


def test_without_matplotlib_the_numbers_are_shown(tmp_path, monkeypatch):
    Jsonl(tmp_path).log({"train/loss": 0.5}, 0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    html = Display(tmp_path)._repr_html_()
    assert "loss 0.5" in html
    assert "[report]" in html


def test_live_draws_while_the_run_goes_on(tmp_path, shown):
    Jsonl(tmp_path).log({"train/loss": 4.0}, 0)
    tracker = live(tmp_path, every=0.0)
    assert isinstance(tracker, Tracker)
    for step in range(1, 3):
        tracker.log({"train/loss": 4.0 / (step + 1)}, step)
    assert "nothing logged yet" in shown[0]
    assert [re.search(r"(\d) steps", html)[1] for html in shown[1:]] == ["1", "2", "3"]
    tracker.rewind(1)
    tracker.close()
    assert "1 steps" in shown[-1]


def test_live_draws_no_more_often_than_asked(shown):
    tracker = Live(every=1e6)
    with MultiTracker([tracker]) as several:
        for step in range(20):
            several.log({"train/loss": 1.0}, step)
    assert len(shown) == 3  # at the start, at the first step, at the end
    assert "20 steps" in shown[-1]


def test_live_outside_of_notebooks(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(ConfigError, match="IPython is not installed"):
        live()
