"""What the public functions of a module promise."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any


def read_defaults(module: ModuleType, *, by_name: bool = False) -> dict[str, dict[str, Any]]:
    """Return name -> its defaults where it has some; all names need an example, with ``by_name`` keywords only."""
    found = {}
    for name in module.__all__:
        public = getattr(module, name)
        assert ">>>" in public.__doc__, name
        if inspect.isfunction(public):
            parameters = inspect.signature(public).parameters.values()
            assert not by_name or all(p.kind is p.KEYWORD_ONLY for p in parameters), name
            found[name] = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {name: defaults for name, defaults in found.items() if defaults}
