"""Find the answer in a text, and compare two mathematical expressions.

Expressions are compared by math-verify in processes that can be ended.

Computer algebra on what a model wrote can take for ever (``9^{9^{9^9}}`` is one operation that holds the interpreter),
and math-verify's own limit is a signal, which only a main thread can have. So it runs in a small pool of processes,
and one that does not answer in time is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import sys
import threading
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from rlkit import _check, _runtime
from rlkit._process import Child, ChildLost
from rlkit.errors import BackendError, BackendTimeout, ConfigError

__all__ = ["between_tags", "boxed", "last_number", "math_equal"]

_BRACES = re.compile(r"(\\boxed\s*\{)|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.])([-+\u2212]?)[$\u20ac\u00a3]?"  # a sign, and a currency after it
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:[ \u00a0\u202f\u2009][0-9]{3})+)(?![0-9])|[0-9]+|(?=\.[0-9]))"
    r"((?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
)
_EXPONENT = re.compile(r"[^eE]+[eE][-+]?[0-9]{1,3}\s*")
_DIGITS = 1000  # of an integer; longer ones are not numbers that anybody meant


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}``; None without one.

    Braces inside have to balance; ``\{`` and ``\}`` are characters. Of nested boxes the outer one counts.

    >>> boxed(r"so \boxed{1}, or rather \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> boxed(r"\boxed{3} and \boxed{4") , boxed("3")
    ('3', None)

    Source: the form that MATH's solutions have. Peers: most libraries look for the last one; several stop at the
    first closing brace.
    """
    _text("boxed(text)", text)
    opened: list[int | None] = []  # where the content of each open brace begins; None: no box
    inner = None
    for match in _BRACES.finditer(text):
        if match[1]:
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened and (start := opened.pop()) is not None:
            inner = start, match.start()
    return None if inner is None else text[inner[0] : inner[1]].strip()


def last_number(text: str) -> int | float | None:
    """Return the last number in a text: an int, a float if it is written as one, None without any.

    Commas or blanks between thousands are read, and so is a sign that stands directly before the number or before its
    currency. Digits inside of words do not count.

    >>> last_number("It costs $1,234.50."), last_number("7 - 3 = 4"), last_number("x1"), last_number("-$1 000")
    (1234.5, 4, None, -1000)

    Source: the usual score for GSM8K.
    """
    _text("last_number(text)", text)
    last = None
    for match in _NUMBER.finditer(text):
        digits = re.sub(r"\D", "", match[2])
        written = match[1].replace("\u2212", "-") + digits + match[3]
        if "." in written or "e" in written.lower():
            last = written if len(written) <= _DIGITS and math.isfinite(float(written)) else last
        elif len(written) <= _DIGITS:
            last = written
    if last is None:
        return None
    return float(last) if "." in last or "e" in last.lower() else int(last)


def between_tags(text: str, tag: str = "answer") -> str | None:
    """Return the text between the last ``<tag>`` and ``</tag>``, stripped of white space; None without a pair.

    >>> between_tags("<answer>3</answer> no: <answer> 4 </answer>"), between_tags("<answer>3")
    ('4', None)
    """
    _text("between_tags(text)", text)
    _check.require(isinstance(tag, str) and tag, "tag", tag, "a tag's name")
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def _text(where: str, text: str) -> None:
    _check.require(isinstance(text, str), where, text, "a string")


_LONGEST = 10_000  # characters
_START = 120.0  # seconds; importing the algebra takes about two on a quiet machine
_PASSED = ("PATH", "HOME", "LD_LIBRARY_PATH", "SYSTEMROOT")
_WORKER = Path(__file__).with_name("_math_worker.py")


def math_equal(answer: str, truth: str, *, timeout: float = 5.0) -> bool:
    r"""Return whether ``answer`` is mathematically equal to ``truth``: fractions, decimals, sets, intervals, algebra.

    May be called from any thread, and blocks it: from asynchronous code, ``await asyncio.to_thread(math_equal, ...)``.

    Args:
        answer: the policy's, LaTeX or plain, with ``$`` or ``\boxed{}`` around it or without; any text is allowed.
        truth: the reference.
        timeout: seconds for the comparison, > 0; waiting for a free process does not count.

    Returns:
        False for what cannot be parsed, for texts over 10,000 characters, and when the time is up.

    Raises:
        ConfigError: math-verify is not installed, or an argument has the wrong type.
        BackendError: no process could be started.

    >>> math_equal("3", " 3"), math_equal("0.50", "1/2")  # needs no algebra
    (True, True)

    Source: math-verify 0.9 (Hugging Face), with its own settings. It reads expressions by SymPy, which evaluates them
    as Python; that too is a reason for a separate process.
    """
    for where, value in (("answer", answer), ("truth", truth)):
        _check.require(isinstance(value, str), where, value, "a string")
    timeout = _check.real("timeout", timeout, above=0.0, why="seconds")
    if answer.strip() == truth.strip() and answer.strip():
        return True
    if max(len(answer), len(truth)) > _LONGEST or not answer.strip() or not truth.strip():
        return False
    numbers = _fraction(answer), _fraction(truth)
    if None not in numbers and numbers[0] == numbers[1]:
        return True
    return _POOL.ask({"answer": answer, "truth": truth}, timeout)


def _fraction(text: str) -> Fraction | None:
    if len(text) > 50 or ("e" in text.lower() and not _EXPONENT.fullmatch(text)):
        return None
    try:
        return Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        return None


class _Pool:
    """The free processes, and a limit on how many there may be."""

    def __init__(self, size: int) -> None:
        self._places = threading.BoundedSemaphore(size)
        self._free: list[Child] = []

    def ask(self, question: Mapping[str, str], timeout: float) -> bool:
        with self._places:
            child = self._take_child()
            try:
                equal = child.ask(question)[1].result(timeout)["equal"] is True
            except (ChildLost, TimeoutError):
                child.end()
                return False
            except BaseException:  # interrupted here: what it does now is unknown
                child.end()
                raise
            self._free.append(child)
        return equal

    def _take_child(self) -> Child:
        """Return a free process, or a new one."""
        with contextlib.suppress(IndexError):
            while True:
                child = self._free.pop()
                if not child.lost:  # the system may have killed it
                    return child
        return _start_child()


def _start_child() -> Child:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"math_equal needs math-verify; run: {_runtime.command('math')}")
    # What a model wrote is evaluated there: it gets none of the keys that are in the environment.
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    where = "the process for math_equal"
    try:
        child = Child([sys.executable, "-P", "-W", "ignore", str(_WORKER)], environment=environment)
    except OSError as error:
        raise BackendError(f"{where} could not be started: {error}") from error
    try:
        failed = child.ask({})[1].result(_START).get("failed")
    except ChildLost as error:
        failed = str(error)
    except TimeoutError:
        child.end()
        raise BackendTimeout(f"{where} was not ready after {_START:.0f} s") from None
    if failed is not None:
        child.end()
        raise BackendError(f"{where} could not be started: {failed}")
    return child


_POOL = _Pool(max(1, min(4, (os.cpu_count() or 1))))
