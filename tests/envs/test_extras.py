"""The packages of adapters are found although a script of the user's has their name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
from rlkit.envs._adapters import package
found = package("gem", "gem", "pip install it"), package("gem", "gem.inner", "pip install it")
import gem, gem.inner
assert (gem, gem.inner) == found, "import gem is the package from now on"
print(gem.NAME, gem.inner.NAME, __file__)
"""


@pytest.fixture
def site(tmp_path):
    """A folder with a package gem, which imports itself by name."""
    folder = tmp_path / "site"
    (folder / "gem").mkdir(parents=True)
    (folder / "gem/__init__.py").write_text("NAME = 'outer'\nimport gem.inner\n")
    (folder / "gem/inner.py").write_text("import gem\nNAME = 'inner'\n")
    return folder


def run(folder, *arguments, site, code=0):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*([str(site)] if site else [])])}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=folder, env=env, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["gem.py", "guess.py"])
def test_a_script_beside_a_file_of_the_packages_name(tmp_path, site, name):
    """The script may be that file, or one beside it; its folder comes first in the search."""
    (tmp_path / "gem.py").write_text(SCRIPT)
    (tmp_path / name).write_text(SCRIPT)
    assert run(tmp_path, tmp_path / name, site=site).startswith("outer inner ")


def test_in_the_working_directory(tmp_path, site):
    """With python -c and python -m, and in notebooks, the working directory comes first."""
    (tmp_path / "gem.py").write_text(SCRIPT)
    assert run(tmp_path, "-c", "__file__ = ''" + SCRIPT, site=site).startswith("outer inner")
    assert run(tmp_path, "-m", "gem", site=site).startswith("outer inner")


def test_a_package_of_the_users_own_stays_first(tmp_path, site):
    """A fork kept beside the script is a package too, and is what was meant."""
    (tmp_path / "gem").mkdir()
    (tmp_path / "gem/__init__.py").write_text("NAME = 'mine'\n")
    (tmp_path / "gem/inner.py").write_text("NAME = 'fork'\n")
    (tmp_path / "play.py").write_text(SCRIPT)
    assert run(tmp_path, "play.py", site=site).startswith("mine fork ")


def test_what_can_not_be_helped_is_said(tmp_path, site):
    """The package is missing, or the file was imported before: one error, which names the file."""
    (tmp_path / "gem.py").write_text("")
    (tmp_path / "play.py").write_text("import gem" + SCRIPT)
    said = run(tmp_path, "play.py", site=site, code=1)
    assert "ConfigError" in said
    assert "pip install it" in said
    assert f"{tmp_path / 'gem.py'}, which hides it; rename that file" in said
    (tmp_path / "openreward.py").write_text(
        "from rlkit.envs._adapters import package; package('o', 'openreward.x', 'y')"
    )
    assert "ConfigError" in run(tmp_path, "openreward.py", site=None, code=1)


def test_a_package_that_fails_is_not_left_half_imported(tmp_path, site):
    """Its error passes through, and the next try says the same."""
    (site / "gem/__init__.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "gem.py").write_text(
        "from rlkit.envs._adapters import package\n"
        "import sys\n"
        "for _ in range(2):\n"
        "    try:\n        package('gem', 'gem', 'x')\n"
        "    except Exception as error:\n        print(type(error).__name__, 'nothing_of' in str(error))\n"
        "assert 'gem' not in sys.modules\n"
    )
    assert run(tmp_path, "gem.py", site=site) == "ConfigError True\n" * 2
