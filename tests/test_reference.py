"""The reference page is what the registries and docstrings say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")
import rlkit

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(reference):
    """docs/reference.md is what ``python docs/reference.py`` writes."""
    assert reference.PAGE.read_text() == reference.page()


def test_every_registered_function_has_a_source(reference):
    """Every estimator and loss says in one line what it is, and where it comes from."""
    exempt = {"cross_entropy", "running_baseline", "running_normalization"}
    for registry in (rlkit.advantages.registry, rlkit.losses.registry, rlkit.losses.kl.registry):
        for name, summary in registry.table():
            assert summary.endswith("."), name
            assert name in exempt or "Source" in (registry[name].__doc__ or ""), name
