"""The reference page is what the registries and docstrings say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import rlkit

SCRIPT = Path(__file__).parents[1] / "docs" / "reference.py"


def test_page_is_up_to_date():
    """docs/reference.md is what ``python docs/reference.py`` writes, in a process where nobody registered more."""
    found = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_every_registered_function_has_a_source():
    """Every estimator and loss of rlkit says in one line what it is, and where it comes from."""
    exempt = {"cross_entropy", "running_baseline", "running_normalization"}
    checked = 0
    for registry in (rlkit.advantages.registry, rlkit.losses.registry, rlkit.losses.kl.registry):
        for name, summary in registry.table():
            if registry[name].__module__.startswith("rlkit.") and name not in exempt:
                assert summary.endswith("."), name
                assert "Source" in registry[name].__doc__, name
                checked += 1
    assert checked > 70
