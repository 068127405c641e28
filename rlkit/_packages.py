"""The command that installs rlkit, what is missing, and names of packages that are imported on first use."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlkit.errors import MissingPackageError

__all__ = ["PACKAGE", "VERSION", "command", "has_torch", "lazy_names", "missing"]

NAME = "rlkit-lm"  # of the distribution; "rlkit" on PyPI is another project
VERSION = "0.1.0"
PACKAGE = Path(__file__).parent
ROOT = PACKAGE.resolve().parent


@cache
def command(*extras: str) -> str:
    """Return a working ``pip install`` command: from the tree, archive or repository rlkit came from, else by name.

    >>> command("report").startswith("pip install ")
    True
    """
    wanted = f"[{','.join(extras)}]" if extras else ""
    if (ROOT / "pyproject.toml").is_file():  # a checkout, installed with -e or on the path
        return f"pip install -e {shlex.quote(f'{ROOT}{wanted}')}"
    source = _source()
    return f"pip install {_quoted(f'{NAME}{wanted} @ {source}' if source else f'{NAME}{wanted}')}"


def _source() -> str | None:
    """Return the source of the installed distribution as a requirement (PEP 610); None: an index."""
    try:
        text = importlib.metadata.distribution(NAME).read_text("direct_url.json")
        origin = json.loads(text) if text else None
        url = str(origin["url"]) if origin else None
        if origin and url and "vcs_info" in origin:
            url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
        if origin and "subdirectory" in origin:
            url = f"{url}#subdirectory={origin['subdirectory']}"
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None
    return url


def _quoted(requirement: str) -> str:
    return f"'{requirement}'" if "'" not in requirement else shlex.quote(requirement)


@cache
def has_torch() -> bool:
    """Return whether torch can be imported."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:
        return False


def missing(what: str, package: str, *extras: str) -> MissingPackageError:
    """Return the error of ``what`` that needs a package which is not installed, with the command that installs it."""
    return MissingPackageError(f"{what} needs {package}: {command(*extras)}")


def lazy_names(
    package: str, places: Mapping[str, str], *, renamed: bool = False
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports some of its names on first use.

    Args:
        package: its ``__name__``.
        places: name -> the module that defines it.
        renamed: whether the ``__module__`` of each becomes the package, where users import it from.
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(places[name]), name)
        if renamed:
            value.__module__ = package
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *places})
