"""How near the tests come to their bounds: ``python -m pytest -p tests.margins --margins=FILE tests/...``.

The file gets, for each test and each line of it that compares floats within a bound, the largest error as a share of
what is allowed (1 is the bound), ``"exact"`` for floats that have to be equal, and "failed" for a test that failed. It
sees ``numpy.testing.assert_allclose``, ``torch.testing.assert_close``, ``pytest.approx``, ``isclose`` and ``allclose``
of numpy, torch and math, and the ``<``, ``<=``, ``>`` and ``>=`` of assertions whose bound is small. A bound holds on
another processor if no more than a quarter of it is used on any of these::

    ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
    ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41
    OMP_NUM_THREADS=1
    OMP_NUM_THREADS=2

``python -m tests.margins FILE FILE ...`` prints a table of the lines that use more in any of the files.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

__all__ = []

ROOT = Path(__file__).parents[1]
SMALL = 0.011  # a bound beyond it is no tolerance
LARGE_SHARE = 0.25

shares: dict[str, dict[str, float | str]] = {}
current = ""
wrapped: set[str] = set()


def record(place, share):
    """Keep the largest share of a place in the test that runs now."""
    if current and place:
        of_test = shares.setdefault(current, {})
        if share == "exact":
            of_test.setdefault(place, share)
        else:
            before = of_test.get(place, 0.0)
            of_test[place] = share if before == "exact" else max(before, share)


def find_place():
    """Return the innermost line of the tests, or of the conformance suite, that is being run; None in other code."""
    frame = sys._getframe(2)
    while frame:
        file = frame.f_code.co_filename
        if file.startswith((f"{ROOT}/tests/", f"{ROOT}/rlkit/testing/")) and file != __file__:
            return f"{file.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        if file.startswith(f"{ROOT}/rlkit/"):
            return None
        frame = frame.f_back
    return None


def to_array(value):
    """Return a tensor, an array or a number as a float64 array, or None for what is none of these."""
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        value = value.detach().cpu().double().numpy()
    try:
        array = np.asarray(value)
        return array.astype(np.float64) if array.dtype.kind in "fiub" and array.size else None
    except (TypeError, ValueError):
        return None


def is_float(value):
    kind = getattr(value, "dtype", None)
    if kind is None:
        kind = np.asarray(value).dtype if isinstance(value, list | tuple) else type(value)
    return "float" in str(kind)


def share_of(actual, expected, relative, absolute):
    """Return the largest |actual - expected| / (absolute + relative |expected|); 0 where both are the same or inf."""
    actual, expected = to_array(actual), to_array(expected)
    if actual is None or expected is None:
        return None
    with np.errstate(all="ignore"):
        error = np.abs(actual - expected)
        allowed = absolute + relative * np.abs(expected)
        share = np.where((actual == expected) | (np.isnan(actual) & np.isnan(expected)), 0.0, error / allowed)
    return float(np.nan_to_num(share, nan=0.0, posinf=math.inf).max())


def watch(module, name, tolerances):
    """Let a function of two values, with ``tolerances(actual, expected, *args, **options)``, record its share."""
    function = getattr(module, name)

    @functools.wraps(function)
    def watched(actual, expected, *args, **options):
        place = find_place()
        if place:
            relative, absolute = tolerances(actual, expected, *args, **options)
            if relative == 0 == absolute:
                share = "exact" if is_float(actual) or is_float(expected) else None
            else:
                share = share_of(actual, expected, relative, absolute)
            if share is not None:
                record(place, share)
        return function(actual, expected, *args, **options)

    setattr(module, name, watched)


def closeness(relative, absolute, names=("rtol", "atol")):
    """Return how to read the two tolerances of a call, given their defaults."""

    def read(_actual, _expected, *args, **options):
        values = [relative, absolute]
        values[: len(args)] = args[:2]
        return tuple(options.get(name, value) for name, value in zip(names, values, strict=True))

    return read


def torch_closeness(actual, expected, rtol=None, atol=None, **_options):
    from torch.testing._comparison import default_tolerances

    if rtol is not None and atol is not None:
        return rtol, atol
    tensors = [x for x in (actual, expected) if hasattr(x, "dtype")]
    found = default_tolerances(*tensors) if tensors else (1.3e-6, 1e-5)
    return tuple(found[i] if x is None else x for i, x in enumerate((rtol, atol)))


def nothing_allowed(*_args, **_options):
    return 0, 0


def watch_approx():
    """``pytest.approx`` of sequences, mappings and arrays compares scalars."""
    scalar = type(pytest.approx(1.0))
    compare = scalar.__eq__

    def compared(self, actual):
        place = find_place()
        if place and isinstance(self.expected, float | int | np.number):
            share = share_of(actual, self.expected, 0.0, self.tolerance)
            if share is not None:
                record(place, share)
        return compare(self, actual)

    scalar.__eq__ = compared


def watch_torch():
    """Once it is imported: a test of numpy's parts does not import it."""
    if "torch" in sys.modules and "torch" not in wrapped and hasattr(sys.modules["torch"], "testing"):
        wrapped.add("torch")
        torch = sys.modules["torch"]
        watch(torch.testing, "assert_close", torch_closeness)
        watch(torch, "allclose", closeness(1e-5, 1e-8))
        watch(torch, "isclose", closeness(1e-5, 1e-8))
        watch(torch, "equal", nothing_allowed)


class InAssertions(ast.NodeTransformer):
    """Replace ``a < b`` by a call that also records it; ``literals`` are those of a bound."""

    def __init__(self, file):
        self.file = file

    def visit_Compare(self, node):
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            return node
        source = ast.unparse(node)
        literals = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, float)]
        tells = [type(node.ops[0]).__name__, f"{self.file}:{node.lineno}", any(0 < x < SMALL for x in literals)]
        call = ast.Call(
            ast.Name("__compare_and_record__", ast.Load()),
            [node.left, node.comparators[0], *(ast.Constant(x) for x in [*tells, source])],
            [],
        )
        return ast.fix_missing_locations(ast.copy_location(call, node))


class Assertions(ast.NodeTransformer):
    def __init__(self, file):
        self.inner = InAssertions(file)

    def visit_Assert(self, node):
        node.test = self.inner.visit(node.test)
        return node


def compare_and_record(left, right, operator, place, small, _source):
    outcome = {
        "Lt": lambda: left < right,
        "LtE": lambda: left <= right,
        "Gt": lambda: left > right,
        "GtE": lambda: left >= right,
    }[operator]()
    value, bound = (left, right) if operator.startswith("L") else (right, left)
    if (is_float(value) or is_float(bound)) and not isinstance(value, list | tuple):
        value, bound = to_array(value), to_array(bound)
        if value is None or bound is None or (value < 0).any() or (bound < 0).any():
            return outcome
        if small or (bound < SMALL).all():
            with np.errstate(all="ignore"):
                share = np.where(value == 0, 0.0, value / bound)
            record(place, float(np.nan_to_num(share, posinf=math.inf).max()))
    return outcome


def rewrite_all_assertions():
    """Let pytest compile every test again, with comparisons that are recorded, and keep none of it."""
    from _pytest.assertion import rewrite

    rewrite_asserts = rewrite.rewrite_asserts

    def rewritten(module, source, path=None, config=None):
        file = str(path or "")
        if file.startswith((f"{ROOT}/tests/", f"{ROOT}/rlkit/testing/")):
            Assertions(file.removeprefix(f"{ROOT}/")).visit(module)
        rewrite_asserts(module, source, path, config)

    rewrite.rewrite_asserts = rewritten
    rewrite._read_pyc = lambda *_args, **_options: None
    rewrite._write_pyc = lambda *_args, **_options: None
    builtins.__compare_and_record__ = compare_and_record


def pytest_addoption(parser):
    parser.addoption("--margins", default="margins.json", help="where the largest shares of bounds are written")


def pytest_configure(config):
    rewrite_all_assertions()
    watch_approx()
    watch(np.testing, "assert_allclose", closeness(1e-7, 0.0))
    watch(np.testing, "assert_array_equal", nothing_allowed)
    watch(np, "array_equal", nothing_allowed)
    watch(np, "allclose", closeness(1e-5, 1e-8))
    watch(np, "isclose", closeness(1e-5, 1e-8))
    watch(math, "isclose", lambda *_args, rel_tol=1e-9, abs_tol=0.0: (rel_tol, abs_tol))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    global current
    current = item.nodeid
    yield
    current = ""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call():
    watch_torch()
    yield


def pytest_runtest_logreport(report):
    if report.failed:
        shares.setdefault(report.nodeid, {})["failed"] = math.inf


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take what a worker of pytest-xdist found."""
    for test, places in node.workeroutput.get("margins", {}).items():
        shares.setdefault(test, {}).update(places)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["margins"] = shares
    else:
        Path(session.config.getoption("--margins")).write_text(json.dumps(shares, indent=1))


def pytest_terminal_summary(terminalreporter):
    large = [
        (share, test, place)
        for test, places in shares.items()
        for place, share in places.items()
        if is_large(share, places)
    ]
    terminalreporter.section(f"{len(large)} bounds of {len(shares)} tests of which more than a quarter is used")
    for share, test, place in sorted(large, reverse=True):
        terminalreporter.write_line(f"{share:9.3g}  {test}  {place}")


def is_large(share, places):
    """Beyond 1 a test that passed asks that numbers differ."""
    return share != "exact" and share > LARGE_SHARE and (share <= 1 or "failed" in places)


def print_table(files):
    found = [json.loads(Path(file).read_text()) for file in files]
    rows = {(test, place) for shares in found for test, places in shares.items() for place in places}
    print("share of the bound:", *files, sep="\n  ")
    for test, place in sorted(rows):
        row = [shares.get(test, {}).get(place, math.nan) for shares in found]
        if any(is_large(x, shares.get(test, {})) for x, shares in zip(row, found, strict=True)):
            print(*(f"{x:>7}" if x == "exact" else f"{x:7.2g}" for x in row), test, place)


if __name__ == "__main__":
    print_table(sys.argv[1:])
