"""Shared parts of adapters: packages imported on demand, schemas, splits, and separate random streams.

Separate random streams for packages that draw from the process's.

Modules that say ``import random`` or ``import numpy as np`` hold these modules under a name. ``shield`` puts stand-ins
in their place, which draw from the stream that is active in the calling context, and from the process's where none is.
So nothing that is drawn or seeded in there is seen outside, and calls in other threads need not wait for each other.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import importlib.util
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np

from rlkit import _check
from rlkit.errors import ConfigError

_lock = threading.Lock()


def package(adapter: str, module: str, install: str) -> ModuleType:
    """Import ``module``, or raise a ConfigError that says what to install.

    A file of the user's own that has the package's name, such as a script gem.py that plays GEM's games, does not hide
    the package.
    """
    top = module.partition(".")[0]
    # Some load data sets themselves; before its release 4 the package datasets asks on stdin whether to run their code.
    os.environ.setdefault("HF_DATASETS_TRUST_REMOTE_CODE", "0")
    try:
        with _lock:
            if top not in sys.modules and (spec := _behind_a_file(top)) is not None:
                _load(top, spec)
        return importlib.import_module(module)
    except ImportError as error:
        text = f"rlkit.envs.{adapter}: module {module!r} cannot be imported ({error}); install it with {install}"
        loaded = sys.modules.get(top)
        if loaded is not None and not hasattr(loaded, "__path__"):
            text += f"; {top!r} was imported from {getattr(loaded, '__file__', None)}, which hides it; rename that file"
        raise ConfigError(text) from error


def _behind_a_file(top: str) -> ModuleSpec | None:
    """Return where the package of that name is, if a single file of that name is found before it."""
    try:
        first = importlib.util.find_spec(top)
    except ValueError:  # the main module of a debugger or notebook may have no spec
        return None
    if first is None or first.submodule_search_locations is not None or first.origin is None:
        return None
    folder = Path(first.origin).resolve().parent
    spec = PathFinder.find_spec(top, [entry for entry in sys.path if Path(entry).resolve() != folder])
    return spec if spec is not None and spec.submodule_search_locations is not None else None


def _load(top: str, spec: ModuleSpec) -> None:
    module = importlib.util.module_from_spec(spec)
    sys.modules[top] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[top]
        raise


def function_schema(name: str, description: str | None, parameters: Mapping[str, object] | None) -> dict[str, object]:
    """Return a tool's function schema, OpenAI style.

    >>> made = function_schema("f", None, {"type": "object", "title": "F", "properties": {"title": {"title": "Title"}}})
    >>> made["function"]
    {'name': 'f', 'description': '', 'parameters': {'type': 'object', 'properties': {'title': {}}}}
    """
    schema = drop_titles(dict(parameters or {"type": "object", "properties": {}}))
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def drop_titles(schema: object) -> object:
    """Return a schema without pydantic's titles: they say nothing, and a prompt is paid for by the token."""
    if isinstance(schema, list):
        return [drop_titles(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return {
        key: {name: drop_titles(part) for name, part in value.items()}
        if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping)
        else value
        if key in ("enum", "const", "default", "examples")
        else drop_titles(value)
        for key, value in kept.items()
    }


SPLITS = ("train", "test", "validation")
_ROOM = 2**30  # tasks per split, so that seeds stay below numpy's 2**32


def seeds(split: str, seed: int) -> Callable[[int], int]:
    """Index -> seed in [0, 2**32): another one for each index, and for each split, whatever their ``seed`` is."""
    kind = SPLITS.index(_check.choice("split", split, SPLITS))
    start = int(np.random.SeedSequence(_check.integer("seed", seed, low=0)).generate_state(1)[0])
    return lambda index: 4 * ((start + index) % _ROOM) + kind


class Stream:
    """What the process has once, for one environment: Python's generator and numpy's."""

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed)
        self.numpy = np.random.RandomState(seed % 2**32)  # it replaces the old functions

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make shielded modules draw from this stream."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)


_active: contextvars.ContextVar[Stream | None] = contextvars.ContextVar("rlkit_stream", default=None)


class _StandIn(types.ModuleType):
    """A module like the one that it replaces, except for what draws or seeds."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> object:
        module = self.__dict__["_module"]
        stream = _active.get()
        if module is np:
            return _stand_ins[np.random] if name == "random" else getattr(np, name)
        rng = None if stream is None else stream.python if module is random else stream.numpy
        drawn = rng is not None and not name.startswith("_") and hasattr(rng, name) and callable(getattr(module, name))
        return getattr(rng if drawn else module, name)


_stand_ins: dict[types.ModuleType, types.ModuleType] = {module: _StandIn(module) for module in (random, np, np.random)}


def shield(packages: Iterable[str], modules: Iterable[str] = ()) -> None:
    """Shield all modules of ``packages``, also those that are imported later, and single ``modules``."""
    wanted = set(modules)
    with _lock:
        _Importer.prefixes |= {f"{package}." for package in packages}
        if _importer not in sys.meta_path:
            sys.meta_path.insert(0, _importer)
        for name, module in list(sys.modules.items()):
            if name in wanted or name.startswith(tuple(_Importer.prefixes)):
                _shield_module(module)


def _shield_module(module: types.ModuleType) -> None:
    for key, value in list(vars(module).items()):
        if isinstance(value, types.ModuleType) and value in _stand_ins:
            setattr(module, key, _stand_ins[value])


class _Importer:
    """Shields a package's modules when they are imported: some generators import theirs when they first draw."""

    prefixes: ClassVar[set[str]] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return Python's own spec of a shielded module, with a loader that shields it at the end."""
        if not name.startswith(tuple(self.prefixes)):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if isinstance(spec, ModuleSpec) and isinstance(spec.loader, SourceFileLoader):
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _shield_module(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_importer = _Importer()
