"""What holds threads, connections or memory until it is closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NoReturn, Self


class Resource(ABC):
    """A context manager that closes itself, and that can be neither pickled nor copied."""

    _instead: ClassVar[str] = "open one in each process"

    @abstractmethod
    def close(self) -> None:
        """Free what is held. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        what = f"a {type(self).__name__} holds threads, connections or memory, and cannot be pickled or copied"
        raise TypeError(f"{what}; {self._instead}")
