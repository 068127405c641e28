"""Schedules: pure functions of the step."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit import schedules
from rlkit.errors import ConfigError
from tests.each import for_each
from tests.golden import Case, assert_close, cases, each_case
from tests.properties import examples

laws = examples(50)
counts, levels = st.integers(0, 40), st.floats(0, 1)


@each_case(cases("losses_supervised", "chord_schedule"))
def test_reference_values(case: Case) -> None:
    """chord_schedule gives what the independent reference and Trinity give."""
    assert_close(case.find("rlkit.schedules")(**case.inputs, **case.settings), case.expected["value"])


@laws
@given(counts, levels, levels, st.integers(1, 30))
def test_lines_and_cosines(step: int, start: float, end: float, steps: int) -> None:
    """Both begin at start, end at end, and stay there; between them lies every value."""
    part = min(step / steps, 1.0)
    assert schedules.linear(step, start=start, end=end, steps=steps) == pytest.approx(start + part * (end - start))
    expected = end + (start - end) * (1 + math.cos(math.pi * part)) / 2
    assert schedules.cosine(step, start=start, end=end, steps=steps) == pytest.approx(expected)
    for schedule in (schedules.linear, schedules.cosine):
        found = [schedule(k, start=start, end=end, steps=steps) for k in (0, steps, 10**9)]
        assert found == [pytest.approx(start), end, end]


def test_warmup() -> None:
    """The first step already moves, the last one of the warm-up is whole; without one the first is whole, or a peak."""
    assert [schedules.warmup(step, steps=4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert schedules.warmup(0, steps=0) == schedules.warmup(0, steps=1) == 1.0
    assert schedules.chord_schedule(0, warmup_steps=0, decay_steps=10, peak=0.5) == 0.5
    assert schedules.chord_schedule(3, warmup_steps=3, decay_steps=0, valley=0.1) == 0.1


@laws
@given(*[st.integers(0, 9)] * 3)
def test_wsd(up: int, flat: int, down: int) -> None:
    """Up, flat and down in their turns."""
    steps = up + flat + down
    for step in range(steps + 2 if steps else 0):
        found = schedules.wsd(step, peak=2.0, steps=steps, warmup_steps=up, decay_steps=down, end=0.5)
        if step >= steps:
            assert found == 0.5
        elif step < up:
            assert found == pytest.approx(2.0 * (step + 1) / up)
        elif step < up + flat:
            assert found == 2.0
        else:
            assert found == pytest.approx(2.0 - 1.5 * (step - up - flat) / down)


def test_lr_for() -> None:
    """Llama's rate falls with the width, Qwen's hardly; a LoRA's is ten times that of all weights."""
    for model, power in (("meta-llama/Llama-3.1-8B", 0.781), ("Qwen/Qwen3-8B", 0.0775), ("qwen", 0.0775)):
        found = schedules.lr_for(model, hidden_size=4096)
        assert found == pytest.approx(5e-4 * (2000 / 4096) ** power), model
        assert schedules.lr_for(model, hidden_size=4096, lora=False) * 10 == pytest.approx(found), model


@for_each(
    ("name", "arguments", "settings", "message"),
    [
        ("constant", (True,), {"value": 1.0}, "step"),
        ("constant", (0,), {"value": float("nan")}, "value"),
        ("linear", (0,), {"start": 0.0, "end": 1.0, "steps": 0}, "steps"),
        ("linear", (0,), {"start": None, "end": 1.0, "steps": 1}, "start"),
        ("cosine", (0,), {"start": 0.0, "end": float("inf"), "steps": 1}, "end"),
        ("warmup", (0,), {"steps": -1}, "steps"),
        ("wsd", (0,), {"peak": 1.0, "steps": 5, "warmup_steps": 3, "decay_steps": 3}, "decay_steps"),
        ("wsd", (0,), {"peak": 1.0, "steps": 0, "decay_steps": 0}, "steps"),
        ("lr_for", ("gpt-oss",), {"hidden_size": 64}, "model"),
        ("lr_for", (None,), {"hidden_size": 64}, "model"),
        ("lr_for", ("llama",), {"hidden_size": 0}, "hidden_size"),
        ("lr_for", ("llama",), {"hidden_size": 64, "lora": None}, "lora"),
    ],
)
def test_refused(name: str, arguments: Any, settings: Any, message: str) -> None:
    """A setting out of range is named; tests/test_types.py has more ranges."""
    with pytest.raises(ConfigError, match=rf"^{message}"):
        getattr(schedules, name)(*arguments, **settings)
