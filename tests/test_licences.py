"""No extra installs anything of the GPL or AGPL, which would bind programs that ship with it."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# Distributions whose metadata names no licence, by the file LICENSE in them.
LOOKED_AT = {
    "openai-harmony": "Apache-2.0",
    "prime-pydantic-config": "Apache-2.0",
    "zss": "BSD-3-Clause",
}
LGPL: set[str] = set()  # of the Lesser GPL, which a library may import; each by name


def requirements(names, extras=()):
    """The requirements in ``names`` that hold here."""
    environments = [{"extra": extra} for extra in (*extras, "")]
    return [
        each
        for each in map(Requirement, names)
        if each.marker is None or any(each.marker.evaluate(environment) for environment in environments)
    ]


def installed_by(extra):
    """{name: distribution}, and the names of those that are not installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    todo = requirements([*project["dependencies"], *optional[extra]])
    found, missing, seen = {}, set(), set()
    while todo:
        each = todo.pop()
        name = canonicalize_name(each.name)
        if name == canonicalize_name(project["name"]):
            todo += requirements([line for extra in each.extras for line in optional[extra]])
            continue
        if (name, *sorted(each.extras)) in seen:
            continue
        seen.add((name, *sorted(each.extras)))
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            missing.add(name)
            continue
        todo += requirements(found[name].requires or (), each.extras)
    return found, missing


def stated(metadata):
    """The licences that metadata lets one choose from: an expression, else classifiers and the first line of a text."""
    expression = metadata.get("License-Expression")
    if expression:
        return [expression] if "(" in expression else expression.split(" OR ")
    found = [line for line in metadata.get_all("Classifier") or () if line.startswith("License :: ")]
    found += (metadata.get("License") or "").strip().splitlines()[:1]
    return ["; ".join(found)] if found else []


def kind(licences):
    """ "GPL", "LGPL" or "" of alternatives; "unknown" where there are none."""
    kinds = []
    for licence in licences:
        plain = re.sub(r"(Lesser|Library) General Public", "LGPL", licence, flags=re.IGNORECASE)
        strict = re.search(r"(?<![A-Z])A?GPL|(Affero )?General Public Licen[sc]e", plain, flags=re.IGNORECASE)
        kinds.append("GPL" if strict else "LGPL" if re.search("LGPL", plain, flags=re.IGNORECASE) else "")
    return min(kinds, key=["", "LGPL", "GPL"].index) if kinds else "unknown"


def test_all_has_nothing_of_the_gpl():
    found, missing = installed_by("all")
    if missing:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}; pip install 'rlkit-lm[all]'")
    assert len(found) > 60
    kinds = {name: kind(stated(each.metadata)) for name, each in found.items()}
    assert {name for name, each in kinds.items() if each == "GPL"} == set()
    assert {name for name, each in kinds.items() if each == "LGPL"} == LGPL
    assert {name for name, each in kinds.items() if each == "unknown"} == LOOKED_AT.keys() & found.keys()
    assert "chess" not in found


def test_no_extra_has_anything_of_the_gpl():
    """As far as they are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert len(project["optional-dependencies"]) > 20
    strict = {}
    for extra in project["optional-dependencies"]:
        found, _ = installed_by(extra)
        strict[extra] = {name for name, each in found.items() if kind(stated(each.metadata)) == "GPL"}
    assert {extra for extra, names in strict.items() if names} == set()


def test_licences_are_read():
    """Expressions, names and families as metadata has them."""
    cases = {
        "GPL": [
            "GPL-3.0+",
            "GNU General Public License v3 or later (GPLv3+)",
            "AGPL-3.0-only",
            "gpl",
            "MIT AND GPL-2.0",
        ],
        "LGPL": ["LGPL-2.1", "GNU Lesser General Public License v3 (LGPLv3)", "GNU Library General Public License v2"],
        "": ["MIT", "MPL-2.0 AND MIT", "Apache Software License", "BSD-3-Clause"],
    }
    assert {text: kind([text]) for texts in cases.values() for text in texts} == {
        text: name for name, texts in cases.items() for text in texts
    }
    assert kind(["GPL-2.0-only", "MIT"]) == ""
    assert kind([]) == "unknown"
    assert kind(stated(importlib.metadata.metadata("pytest"))) == ""
