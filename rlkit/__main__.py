"""``python -m rlkit`` is the command ``rlkit``."""

from __future__ import annotations

import sys

from rlkit.cli import main

sys.exit(main())
