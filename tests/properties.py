"""How many examples a property draws, and which.

The same code draws the same examples on every machine, so a verdict can be repeated. ``make test-draws`` draws new
examples, ten times as many: it sets RLKIT_DRAWS=10 and prints the seed.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

DRAWS = int(os.environ.get("RLKIT_DRAWS", "0"))

settings.register_profile(
    "rlkit",
    derandomize=not DRAWS,
    database=None,  # do not replay an earlier failure: the verdict depends on the code alone
    deadline=None,  # the machine's load decides nothing
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    max_examples=100 * max(DRAWS, 1),
)
settings.load_profile("rlkit")


def examples(count, **options):
    """Return settings that draw ``count`` examples, times RLKIT_DRAWS where that is set."""
    return settings(max_examples=count * max(DRAWS, 1), **options)
