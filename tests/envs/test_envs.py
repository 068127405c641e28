"""What all of it has in common: it is light, and importing it touches nothing."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "reasoning_gym", "gem", "openreward", "aiohttp", "gymnasium", "jsonschema", "pytest")


def test_adapters_import_their_packages_when_they_are_used():
    source = f"""
import sys, threading
import rlkit.envs, rlkit.envs.calling
rlkit.envs.function(["Hi."], len).batch(0, 3)
print([name for name in {HEAVY!r} if name in sys.modules], threading.active_count())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "[] 1\n"


def test_names_and_modules():
    """Users import the adapters from one place, whatever file they are in."""
    import rlkit.envs

    for name in ("function", "gem", "gymnasium", "mixture", "openreward", "reasoning_gym"):
        assert getattr(rlkit.envs, name).__module__ == "rlkit.envs"
        assert name in rlkit.envs.__all__
