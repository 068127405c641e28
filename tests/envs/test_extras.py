"""The packages of adapters are found although a script of the user's has their name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.each import for_each

SCRIPT = """
from rlkit.envs._adapters import package
found = package("gem", "gem", "pip install it"), package("gem", "gem.inner", "pip install it")
import gem, gem.inner
assert (gem, gem.inner) == found, "import gem is the package from now on"
print(gem.NAME, gem.inner.NAME, __file__)
"""


FILES = {"gem/__init__.py": "NAME = 'outer'\nimport gem.inner\n", "gem/inner.py": "import gem\nNAME = 'inner'\n"}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def site(tmp_path):
    """A folder with a package gem, which imports itself by name."""
    return write(tmp_path / "site", FILES)


def run(folder, *arguments, site, code=0):
    """What a program prints, or the last line of what it says where it fails."""
    command, env = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout or done.stderr.strip().splitlines()[-1]


@for_each("arguments", [["gem.py"], ["guess.py"], ["-c", "__file__ = ''" + SCRIPT], ["-m", "gem"]])
def test_a_file_of_the_packages_name(tmp_path, site, arguments):
    """The script, or in the same folder, which comes first in the search, as the working directory with -c and -m."""
    write(tmp_path, {"gem.py": SCRIPT, "guess.py": SCRIPT})
    assert run(tmp_path, *arguments, site=site).startswith("outer inner ")


def test_a_package_of_the_users_own_stays_first(tmp_path, site):
    """A fork in the script's folder is a package too, and is what was meant."""
    write(tmp_path, {"gem/__init__.py": "NAME = 'mine'", "gem/inner.py": "NAME = 'fork'", "play.py": SCRIPT})
    assert run(tmp_path, "play.py", site=site).startswith("mine fork ")


def test_what_can_not_be_helped_is_said(tmp_path, site):
    """The package is missing, or the file was imported before: one error, which names the file."""
    use = "from rlkit.envs._adapters import package; package('o', 'openreward.x', 'y')"
    write(tmp_path, {"gem.py": "", "play.py": "import gem" + SCRIPT, "openreward.py": use})
    said = run(tmp_path, "play.py", site=site, code=1)
    for words in ("ConfigError", "pip install it", f"{tmp_path / 'gem.py'}, which hides it; rename that file"):
        assert words in said
    assert "ConfigError" in run(tmp_path, "openreward.py", site="", code=1)


def test_a_package_that_fails_is_not_left_half_imported(tmp_path, site):
    """Its error passes through, and the next try says the same."""
    write(site, {"gem/__init__.py": "import nothing_of_this_name\n"})
    script = """
import sys
from rlkit.envs._adapters import package
for _ in range(2):
    try:
        package("gem", "gem", "x")
    except Exception as error:
        print(type(error).__name__, "nothing_of" in str(error))
assert "gem" not in sys.modules
"""
    write(tmp_path, {"gem.py": script})
    assert run(tmp_path, "gem.py", site=site) == "ConfigError True\n" * 2
