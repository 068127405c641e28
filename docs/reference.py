"""Writes docs/reference.md from the registries and docstrings: python docs/reference.py (``--check``: only compare)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import rlkit
from rlkit.losses.base import marks

PAGE = Path(__file__).with_name("reference.md")
HEAD = """# Reference

Written by `docs/reference.py` from the docstrings; a test holds it to them. Every function's own docstring says more:
its arguments, what it raises, and an example (`help(rlkit.advantages.grpo)`).
"""


def paragraphs(function: Any) -> list[str]:
    """The docstring's paragraphs, each on one line, without examples and argument lists."""
    found = [part.strip() for part in (inspect.getdoc(function) or "").split("\n\n")]
    kept = [part for part in found if not part.startswith((">>>", "Args:", "Returns:", "Raises:", "Attributes:"))]
    return [" ".join(part.split()) for part in kept]


def settings(function: Callable[..., Any]) -> str:
    """The keyword-only arguments with their defaults."""
    named = inspect.signature(function).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in named if p.kind is p.KEYWORD_ONLY]
    return ", ".join(shown)


def inputs(function: Callable[..., Any]) -> str:
    """The positional arguments, optional ones in brackets."""
    named = inspect.signature(function).parameters.values()
    shown = [p.name if p.default is p.empty else f"[{p.name}]" for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
    return ", ".join(shown)


def entry(name: str, function: Any, *, loss: bool = False) -> str:
    """One function's entry."""
    first, *rest = paragraphs(function)
    lines = [f"### {name}", first, *rest]
    call = [f"inputs: `{inputs(function)}`"]
    if settings(function):
        call.append(f"settings: `{settings(function)}`")
    if loss:
        found = marks(function)
        call.append(f"level: {found.level}" + (", elementwise" if found.elementwise else ""))
    return "\n\n".join([lines[0], lines[1], " · ".join(call), *lines[2:]])


def family(title: str, functions: Iterable[tuple[str, Any]], *, loss: bool = False) -> str:
    """A section of entries, sorted by name."""
    return "\n\n".join([f"## {title}", *(entry(name, f, loss=loss) for name, f in sorted(functions))])


def module(of: Any) -> list[tuple[str, Any]]:
    """The public functions of a module."""
    return [(name, getattr(of, name)) for name in of.__all__ if inspect.isfunction(getattr(of, name))]


def page() -> str:
    """The whole page."""
    losses = [(name, getattr(rlkit.losses, name)) for name in ("with_kl", "with_entropy", "prepare", "traceable")]
    sections = [
        family("Advantages: rlkit.advantages", rlkit.advantages.registry.items()),
        family("Losses: rlkit.losses", rlkit.losses.registry.items(), loss=True),
        family("Around losses", losses),
        family("KL estimators: rlkit.losses.kl", rlkit.losses.kl.registry.items()),
        family("Corrections: rlkit.corrections", module(rlkit.corrections)),
        family("Filters: rlkit.filters", module(rlkit.filters)),
        family("Rewards: rlkit.rewards", module(rlkit.rewards)),
        family("Schedules: rlkit.schedules", module(rlkit.schedules)),
        family("Metrics: rlkit.metrics", module(rlkit.metrics)),
    ]
    errors = "\n".join(f"- `{name}`: {paragraphs(getattr(rlkit, name))[0]}" for name in rlkit.errors.__all__)
    return "\n\n".join([HEAD.strip(), *sections, f"## Errors\n\n{errors}"]) + "\n"


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(
            0 if PAGE.exists() and PAGE.read_text() == text else "docs/reference.md is not what the docstrings say"
        )
    PAGE.write_text(text)
