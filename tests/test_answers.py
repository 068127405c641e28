"""Answers in texts: found by their form, and judged."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit import _runtime, answers
from rlkit.answers import between_tags, boxed, last_number, math_equal
from rlkit.errors import BackendError, ConfigError
from tests.each import for_each
from tests.properties import examples

GUESS = functools.partial(between_tags, tag="guess")
TAGGED = {
    "<answer> 3\n</answer>": "3",
    "<answer>1</answer><answer>2</answer> <answer>": "2",
    "<answer>a<answer>b</answer>": "b",
    "</answer><answer>": None,
    "<answer>3": None,
    "3</answer>": None,
    "<answer></answer>": "",
}


@for_each(
    ("find", "text", "expected"),
    [
        (boxed, r"\boxed{1} \boxed{2}", "2"),
        (boxed, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (boxed, r"\boxed { x }", "x"),
        (boxed, r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (boxed, r"\boxed{\{1)}", r"\{1)"),  # an escaped brace opens nothing
        (boxed, r"\boxed{a \boxed{b} c}", r"a \boxed{b} c"),
        (boxed, r"\boxed{a \boxed{b}", "b"),
        (boxed, r"\boxed{1} \boxed{2", "1"),
        (boxed, r"} {\boxed{1}}", "1"),
        (boxed, r"\boxed{}", ""),
        (boxed, r"\\boxed{1}", None),  # a line break and a word
        (boxed, "boxed{1}", None),
        (boxed, r"\boxed 1", None),
        (boxed, "", None),
        (last_number, "7 - 3 = 4", 4),
        (last_number, "x = -4.", -4),
        (last_number, "3-4", 4),
        (last_number, "\u22125", -5),
        (last_number, "(+2)", 2),
        (last_number, "$1,234,567.5!", 1234567.5),
        (last_number, "12,34", 34),  # not thousands: two numbers
        (last_number, "1.50", 1.5),
        (last_number, ".5", 0.5),
        (last_number, "-$5", -5),
        (last_number, "\u2212\u20ac1,000", -1000),
        (last_number, "3-$5", 5),
        (last_number, "1 000", 1000),
        (last_number, "1\u202f234\u202f567.5", 1234567.5),
        (last_number, "1 0000", 0),  # two numbers
        (last_number, "1000 000", 0),
        (last_number, "1  000", 0),
        (last_number, "2e3", 2000.0),
        (last_number, "1E400 and 3", 3),
        (last_number, "3 and 1e400", 3),
        (last_number, "5kg", 5),
        (last_number, "x1", None),
        (last_number, "version 1.2.3", 1.2),
        (last_number, "none", None),
        (last_number, "\u0665", None),  # digits of other scripts
        (last_number, "9" * 5000, None),
        (last_number, "1 " + "9" * 5000, 1),
        (last_number, "0" * 10 + "7", 7),
        *((between_tags, text, expected) for text, expected in TAGGED.items()),
        *((GUESS, text.replace("answer", "guess"), expected) for text, expected in TAGGED.items()),
    ],
)
def test_answers_are_found(find, text, expected):
    found = find(text)
    assert found == expected
    assert type(found) is type(expected)


@given(st.recursive(st.text("ab1 ", max_size=3), lambda inner: inner.map(lambda t: "{" + t + "}"), max_leaves=5))
def test_boxed_holds_what_was_put_in(content):
    assert boxed(f"text {{ \\boxed{{{content}}} }} text") == content.strip()


@given(st.text("ab \n=", max_size=10), st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_last_number_reads_what_python_writes(text, number):
    assert last_number(f"3 {text} {number!r} {text}") == number


@given(st.text("\\boxed{}<answer>/1,.-e \n", max_size=200))
@examples(300)
def test_no_text_is_too_odd(text):
    assert isinstance(boxed(text), str | None)
    assert last_number(text) is None or abs(last_number(text)) < float("inf")
    assert isinstance(between_tags(text), str | None)


UNITS = ["\\boxed{", "{", "}", "\\", "1", "1,", "1,111", "-", ".1", "1e", "<answer>", " ", "\\boxed "]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_of_anything(unit):
    """A quadratic search would take hours."""
    for find in (boxed, last_number, between_tags):
        find(unit * (1_000_000 // len(unit)))


@for_each(
    ("function", "arguments", "message"),
    [
        *((find, (None,), "expected a string") for find in (boxed, last_number, between_tags)),
        (math_equal, (3, "3"), "answer: got 3"),
        (math_equal, ("3", None), "truth: got None"),
        (functools.partial(math_equal, timeout=0), ("1", "2"), "timeout"),
    ],
)
def test_wrong_arguments(function, arguments, message):
    with pytest.raises(ConfigError, match=message):
        function(*arguments)


needs_math = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs rlkit-lm[math]")


@needs_math
@for_each(
    ("answer", "truth", "expected"),
    [
        (r"\frac12", "0.5", True),
        (r"the answer is $\frac{1}{2}$", r"\boxed{1/2}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("(x+1)^2", "(x-1)^2", False),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\{2,1\}", r"\{1,2\}", True),
        ("(1,2)", "(2,1)", False),
        ("[0,1)", "[0,1]", False),
        ("1,000", "1000", True),
        ("3", "4", False),
        ("(((((", "3", False),
        ("\x00", "3", False),
        ("\ud800", "3", False),
        ("1/0", "1", False),
        ("3", "", False),
        ("", "", False),
    ],
)
def test_math_equal(answer, truth, expected):
    assert math_equal(answer, truth, timeout=60) is expected


def test_simple_answers_need_no_process(monkeypatch):
    monkeypatch.setattr(answers._POOL, "ask", None)
    equal = {"3": "3 ", "1/2": "0.50", "1000": "1e3", "2.5E-1": "1/4", r"\frac{1}{2}": r"\frac{1}{2}"}
    assert all(math_equal(answer, truth) for answer, truth in equal.items())
    assert not math_equal("x" * 10_001, "1")


@needs_math
def test_an_endless_comparison_is_ended_off_the_main_thread():
    """The algebra would compute for ever; the process is killed, the next comparison gets a new one."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math_equal, "9^{9^{9^{9}}}", "3", timeout=1.0).result(100) is False
        assert pool.submit(math_equal, r"\frac{2}{4}", "0.5", timeout=60).result(100) is True


@needs_math
def test_many_threads_share_few_processes():
    def compare(i):
        return math_equal(rf"\frac{{{i}}}{{3}}", f"{2 * i}/6" if i % 2 else "77", timeout=60)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(compare, range(16))) == [bool(i % 2) for i in range(16)]
    assert 1 <= len(answers._POOL._free) <= 4


@needs_math
def test_a_process_that_the_system_killed_decides_nothing():
    """As where memory is short: the question after it gets another process."""
    pool = answers._Pool(1)
    question = {"answer": "\\frac{2}{4}", "truth": "0.5"}
    assert pool.ask(question, 60) is True
    os.kill(pool._free[0].pid, signal.SIGKILL)
    while not pool._free[0].lost:
        time.sleep(0.01)
    assert pool.ask(question, 60) is True


@needs_math
def test_no_key_of_the_environment_reaches_the_process(monkeypatch):
    """What a model wrote is evaluated there."""
    monkeypatch.setenv("SOME_API_KEY", "canary")
    process = answers._start_child()
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        names = {entry.partition(b"=")[0].decode() for entry in environment if entry}
        assert names <= {*answers._PASSED, "PYTHONPATH", "LC_CTYPE"}
        assert "PYTHONPATH" in names
    finally:
        process.end()


@needs_math
@given(st.text(max_size=30))
@examples(40)
def test_math_equal_takes_any_text(text):
    assert math_equal(text, r"\frac{1}{7}", timeout=10) is False


def test_what_cannot_be_started(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=re.escape(_runtime.command("math"))):
            answers._start_child()
    if importlib.util.find_spec("math_verify") is not None:
        broken = tmp_path / "worker.py"
        broken.write_text('print(\'{"id": 0, "failed": "ImportError: no such thing"}\')')
        monkeypatch.setattr(answers, "_WORKER", broken)
        with pytest.raises(BackendError, match="ImportError: no such thing"):
            answers._start_child()
        broken.write_text("raise SystemExit('it is broken')")
        with pytest.raises(BackendError, match="it wrote: it is broken"):
            answers._start_child()
