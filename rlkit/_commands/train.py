"""Train a policy from a configuration file: one stage or several, or explore, or evaluate.

The keys are those of Trinity-RFT's configurations; docs/recipes.md has what each means here. Run again, it goes on.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from rlkit._commands import _shared

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit train``."""
    parser.add_argument("config", metavar="CONFIG", help="the YAML file of settings")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="override the file: algorithm.optimizer.lr=1e-4"
    )
    parser.set_defaults(words="overrides")
    _shared.add_option(parser)
    parser.add_argument("--check", action="store_true", help="only check the settings and the names in them")
    parser.add_argument("--verbose", action="store_true", help="also list the keys without effect")
    parser.add_argument("--keys", action=_Keys, nargs=0, help="print every key with its type and default")


class _Keys(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the settings, and end the program as ``--help`` does."""
        from rlkit import config, recipes

        print(config.describe(recipes.Settings))
        parser.exit()


def run(options: argparse.Namespace) -> int:
    """Train, and print where the run is kept."""
    _check_file(options.config)
    from rlkit import recipes  # which takes seconds
    from rlkit.recipes.job import NOTE, check_rows

    _shared.imported(options)
    settings = recipes.load(options.config, options.overrides)
    logging.basicConfig(format="%(message)s")
    level = logging.DEBUG if options.verbose else NOTE if options.check else logging.CRITICAL
    level = min(level, logging.getLevelNamesMapping()[settings.log.level])
    logging.getLogger("rlkit.recipes").setLevel(level)
    if options.check:
        for job in recipes.check(settings):
            check_rows(job)
        print("the settings are right")
        return 0
    for outcome in recipes.run(settings, trackers=["console"]):
        print(outcome.folder)
    return 0


def _check_file(path: str) -> None:
    """Raise ConfigError where the file does not exist."""
    from rlkit.errors import ConfigError

    if not Path(path).exists():
        hint = "; write the overrides after the file" if "=" in path else ""
        raise ConfigError(f"{path}: no such file{hint}")
