"""Every reference value of the estimators."""

from __future__ import annotations

import json

import pytest

from tests.golden import COPY, SHARED, Case, assert_close, cases, each_case

pytestmark = pytest.mark.filterwarnings("ignore:rewards. every group has one member")
PAIRS = {"gae": ("advantages", "returns"), "vtrace": ("advantages", "targets")}
FAMILIES = ("advantages_group", "advantages_time", "advantages_tokens", "token_weights")


@each_case([case for family in FAMILIES for case in cases(family)])
def test_reference_values(case: Case) -> None:
    """An estimator gives what the independent reference and the peers named in ``source`` give."""
    function = case.find("rlkit.advantages")
    if case.function == "running_baseline":
        baseline = function(**case.settings)
        result = [baseline.update(*batch) for batch in zip(case.inputs["rewards"], case.inputs["roles"], strict=True)]
    else:
        result = function(**case.inputs, **case.settings)
    if case.function in PAIRS:
        result = dict(zip(PAIRS[case.function], result, strict=True))
    assert_close(result, case.expected["value"])


@pytest.mark.skipif(not SHARED.is_dir(), reason="the originals are not beside this repository")
def test_copy_is_the_original() -> None:
    """The copy under tests/golden holds the same values as the originals."""
    names = sorted(path.name for path in SHARED.glob("*.json"))
    assert names == sorted(path.name for path in COPY.glob("*.json"))
    for name in names:
        assert json.loads((COPY / name).read_text()) == json.loads((SHARED / name).read_text())
