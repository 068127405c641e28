"""A Python without some packages, as after an install without their extras."""

from __future__ import annotations

import subprocess
import sys

HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
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
