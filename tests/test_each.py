"""Loops over cases: no failure is lost, and none hides another."""

from __future__ import annotations

import pytest

from tests.each import for_each


def test_every_failure_is_listed_and_the_first_has_its_traceback():
    tried = []

    @for_each(("a", "b"), [(1, 1), pytest.param(2, 3, id="two"), (4, 4)])
    @for_each("c", [0, 1])
    def rule(self, a, b, c):
        tried.append((self, a, b, c))
        assert a == b + c
        with pytest.raises(KeyError):  # fails by pytest's own exception, which is no Exception
            [][a]

    with pytest.raises(AssertionError) as failed:
        rule("self")
    assert tried == [("self", a, b, c) for a, b in ((1, 1), (2, 3), (4, 4)) for c in (0, 1)]
    first, *lines = str(failed.value).splitlines()
    assert first == "6 of 6 cases failed; the first is shown above"
    assert [line.split(": ")[:2] for line in lines[:3]] == [
        ["  1, 1-0", "IndexError"],
        ["  1, 1-1", "AssertionError"],
        ["  two-0", "AssertionError"],
    ]
    assert isinstance(failed.value.__cause__, IndexError)


def test_a_case_that_skips_hides_no_other():
    @for_each("value", [1, 2, 3])
    def rule(value, last):
        if value == 2:
            pytest.skip("nothing to see")
        assert value < last

    with pytest.raises(AssertionError, match="1 of 3 cases failed"):
        rule(last=3)
    with pytest.raises(pytest.skip.Exception, match="1 of 3 cases: nothing to see"):
        rule(last=4)


def test_the_end_of_the_program_ends_the_loop():
    for end in (KeyboardInterrupt, SystemExit):

        @for_each("value", [1])
        def stop(value, end=end):
            raise end

        with pytest.raises(end):
            stop()


def test_no_cases_are_a_mistake():
    with pytest.raises(AssertionError, match="no cases"):
        for_each("value", [])


@for_each("case", [("one", 1), ("two", 2), ("one", 1)], by=lambda case: case[0])
def test_groups_are_tests_of_their_own(case, request):
    assert request.node.callspec.params["group"] == case[0]
