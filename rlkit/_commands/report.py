"""Write a run as one HTML page: curves, settings, and what the model did."""

from __future__ import annotations

import argparse

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit report``."""
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument("--out", help="the file to write (default: report.html in the folder)")


def run(options: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from rlkit.report import write

    print(write(options.folder, options.out))
    return 0
