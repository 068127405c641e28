"""What all of it has in common: it is light, and importing it touches nothing."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "reasoning_gym", "gem", "openreward", "aiohttp", "gymnasium", "jsonschema", "pytest")


def test_adapters_and_their_packages_are_imported_when_they_are_used():
    """An adapter's own file, which stands on the package, with its first use; completion shows its name."""
    source = f"""
import sys, threading
import rlkit.envs, rlkit.envs.calling
rlkit.envs.function(["Hi."], len).batch(0, 3)
rlkit.envs.gymnasium(dict)[0].make()
print([name for name in {HEAVY!r} if name in sys.modules], threading.active_count())
print([name for name in rlkit.envs.__all__ if f"rlkit.envs._from_{{name}}" in sys.modules])
print(set(rlkit.envs.__all__) <= set(dir(rlkit.envs)), rlkit.envs.agent is rlkit.envs._from_agent.agent)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "[] 1\n['function', 'gymnasium']\nTrue True\n"


def test_names_and_modules():
    """Users import the adapters from one place, whatever file they are in."""
    import rlkit.envs

    for name in ("function", "gem", "gymnasium", "mixture", "openreward", "reasoning_gym"):
        assert getattr(rlkit.envs, name).__module__ == "rlkit.envs"
        assert name in rlkit.envs.__all__
