"""Train a policy from a configuration file: one stage or several, or explore, or evaluate.

The keys are those of Trinity-RFT's configurations; docs/recipes.md has what each means here. Run again, it goes on.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from pathlib import Path

from rlkit.errors import ConfigError

__all__ = ["add_options", "run"]

IMPORT = "of your own, in this folder or installed: it registers environments, rewards, algorithms or losses"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``rlkit train``."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="such as algorithm.optimizer.lr=1e-4")
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=IMPORT)
    parser.add_argument("--check", action="store_true", help="only check the settings and what they name")
    parser.add_argument("--keys", action=_Keys, nargs=0, help="say every key there is, its kind, default and meaning")


class _Keys(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Prints them, and ends the program as ``--help`` does."""
        from rlkit import config, recipes
        from rlkit.recipes.keys import table

        notes = {key: f"  {kind}: {why}" for key, kind, why in table(recipes.Settings)}
        for line in config.describe(recipes.Settings).splitlines():
            print(line + notes.get(line.partition(" ")[0], ""))
        parser.exit()


def run(options: argparse.Namespace) -> int:
    """Trains, and prints where the run is kept."""
    from rlkit import recipes

    for name in options.modules:
        _imported(name)
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


def _imported(name: str) -> None:
    """Imports a module, also one of the folder that the program was started in."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(f"--import {name}: there is no such module, here or installed") from error
