"""A Python without some packages, as after an install without their extras."""

from __future__ import annotations

import subprocess
import sys

HIDE = """
import sys
from importlib.machinery import PathFinder

def find_spec(name, path=None, target=None, found=PathFinder.find_spec):
    return None if name.partition(".")[0] in {names!r} else found(name, path, target)

PathFinder.find_spec = find_spec
"""


def without(names, program, **options):
    """The finished process of ``program``, for which the packages ``names`` are not there."""
    code = HIDE.format(names=tuple(names)) + program
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)


def printed(names, program, **options):
    """What ``program`` prints without the packages ``names``; it must end well."""
    done = without(names, program, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout
