"""``python -m rlkit.server``: the same as ``rlkit serve``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlkit import cli

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted; return the exit status."""
    return cli.main(["serve", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
