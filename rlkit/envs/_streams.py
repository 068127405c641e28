"""Random streams of their own for packages that draw from the process's.

Modules that say ``import random`` or ``import numpy as np`` hold these modules under a name. ``shield`` puts stand-ins
in their place, which draw from the stream that is active in the calling context, and from the process's where none is.
So nothing that is drawn or seeded in there is seen outside, and calls in other threads need not wait for each other.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import sys
import threading
import types
from collections.abc import Iterable, Iterator

import numpy as np


class Stream:
    """What the process has once, for one environment: Python's generator and numpy's."""

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed)
        self.numpy = np.random.RandomState(seed % 2**32)  # it stands in for the old functions

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Shielded modules draw from this stream."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)


_active: contextvars.ContextVar[Stream | None] = contextvars.ContextVar("rlkit_stream", default=None)
_lock = threading.Lock()


class _StandIn(types.ModuleType):
    """A module that answers like the one it stands for, but for what draws or seeds."""

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
    """Shields all modules of ``packages`` that have been imported, and single ``modules``."""
    prefixes = tuple(f"{package}." for package in packages)
    wanted = set(modules)
    with _lock:
        for name, module in list(sys.modules.items()):
            if name in wanted or name.startswith(prefixes):
                for key, value in list(vars(module).items()):
                    if isinstance(value, types.ModuleType) and value in _stand_ins:
                        setattr(module, key, _stand_ins[value])
