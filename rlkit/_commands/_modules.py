"""``--import MODULE``: what a user's own module registers, for the commands that name such things."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from rlkit.errors import ConfigError

__all__ = ["add_option", "imported"]


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--import``, which may be given several times."""
    text = "of your own, in this folder or installed: it registers environments, rewards, algorithms or losses"
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=text)


def imported(options: argparse.Namespace) -> None:
    """Import the modules that were named, also those of the folder that the program was started in."""
    if options.modules and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in options.modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # something that it imports itself
                raise
            raise ConfigError(f"--import {name}: there is no such module, here or installed") from error
