"""The command that adds an extra to rlkit as it is installed here, for messages about packages that are missing."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from functools import cache
from pathlib import Path

__all__ = ["command"]

NAME = "rlkit-lm"  # of the distribution; "rlkit" on PyPI is another project
ROOT = Path(__file__).resolve().parents[1]


@cache
def command(*extras: str) -> str:
    """Return a working ``pip install``: of the tree, archive or repository that rlkit came from, else by name.

    >>> command("report").startswith("pip install ")
    True
    """
    wanted = f"[{','.join(extras)}]" if extras else ""
    if (ROOT / "pyproject.toml").is_file():  # a checkout, installed with -e or on the path
        return f"pip install -e {shlex.quote(f'{ROOT}{wanted}')}"
    source = _source()
    return f"pip install {_quoted(f'{NAME}{wanted} @ {source}' if source else f'{NAME}{wanted}')}"


def _source() -> str | None:
    """Where pip found the distribution, as a requirement writes it (PEP 610); None: in an index."""
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
