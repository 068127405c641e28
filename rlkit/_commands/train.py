"""Train a policy from a configuration file: one stage or several, or explore, or evaluate.

The keys are those of Trinity-RFT's configurations; docs/recipes.md has what each means here. Run again, it goes on.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from rlkit._commands import _modules

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit train``."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="or none; such as algorithm.optimizer.lr=1e-4"
    )
    parser.set_defaults(words="overrides")
    _modules.add_option(parser)
    parser.add_argument("--check", action="store_true", help="only check the settings and what they name")
    parser.add_argument("--keys", action=_Keys, nargs=0, help="say every key there is, its kind, default and meaning")


class _Keys(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print them, and end the program as ``--help`` does."""
        from rlkit import config, recipes
        from rlkit.recipes.keys import table

        notes = {key: f"  {kind}: {why}" for key, kind, why in table(recipes.Settings)}
        for line in config.describe(recipes.Settings).splitlines():
            print(line + notes.get(line.partition(" ")[0], ""))
        parser.exit()


def run(options: argparse.Namespace) -> int:
    """Trains, and prints where the run is kept."""
    _check_file(options.config)
    from rlkit import recipes  # which takes seconds

    _modules.imported(options)
    settings = recipes.load(options.config, options.overrides)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rlkit.recipes").setLevel(settings.log.level)
    if options.check:
        recipes.check(settings)
        print("the settings are right")
        return 0
    for outcome in recipes.run(settings, trackers=["console"]):
        print(outcome.folder)
    return 0


def _check_file(path: str) -> None:
    """Raise ConfigError where there is no such file."""
    from rlkit.errors import ConfigError

    if not Path(path).exists():
        hint = "; the overrides come after the file" if "=" in path else ""
        raise ConfigError(f"{path}: there is no such file{hint}")
