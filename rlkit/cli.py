"""The command line: ``rlkit serve ...``. Each sub-command is a module of ``rlkit._commands``."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from rlkit._runtime import VERSION
from rlkit.errors import RlkitError

__all__ = ["main"]

_DESCRIPTION = "rlkit: reinforcement-learning post-training of language models, in which the user owns the loop."
COMMANDS = ("checkpoints", "doctor", "eval", "report", "serve", "train")
"""Names of modules in ``rlkit._commands``. Each has a docstring, whose first line is its help; ``add_options(parser)``;
and ``run(options)``, which returns the exit status. Importing one imports nothing heavy. One that takes a list of words
names it by ``set_defaults(words=)``, so that some may come after an option."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit status.

    Args:
        arguments: without the program's name; None for those of this process.

    A command that raises one of rlkit's errors prints it in one line on standard error and returns 2, as for a command
    line that cannot be parsed.
    """
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        parser.exit(2)
    options, rest = parser.parse_known_args(arguments)
    words: str | None = getattr(options, "words", None)
    if rest and (words is None or any(text.startswith("-") for text in rest)):
        parser.error(f"{options.command}: unrecognized arguments: {' '.join(rest)}")
    elif rest and words is not None:  # those after an option
        setattr(options, words, [*getattr(options, words), *rest])
    shown, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        status: int = options.run(options)
    except RlkitError as error:
        print(f"rlkit {options.command}: {' '.join(str(error).split())}", file=sys.stderr)  # some have several lines
        return 2
    except KeyboardInterrupt as error:
        if str(error):
            print(f"rlkit {options.command}: {error}", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = shown
    return status


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning without the place in rlkit that raised it."""
    return f"rlkit: {message}\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlkit", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"rlkit {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name in COMMANDS:
        module: Any = importlib.import_module(f"rlkit._commands.{name}")
        text = module.__doc__.strip()
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_options(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
