"""List, verify, export and remove the checkpoints of a run.

rlkit checkpoints RUN                            lists them, and says whether each is whole
rlkit checkpoints RUN --export FOLDER            the newest policy as a peft adapter
rlkit checkpoints RUN --export FOLDER --merged   the same merged into its base, as a standalone model
rlkit checkpoints RUN --keep 3                   removes all but the newest three, on a Tinker service too
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.runs import Record

__all__ = ["add_options", "run"]

_DEADLINE = 60.0  # seconds for each request to a service


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit checkpoints``."""
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument("--step", type=int, help="the checkpoint to export (default: the newest complete one)")
    parser.add_argument("--role", default="policy", help="the policy of the run (default: policy)")
    parser.add_argument("--export", metavar="FOLDER", help="a new folder")
    parser.add_argument("--merged", action="store_true", help="merge the adapter into its base")
    parser.add_argument("--keep", type=int, metavar="N", help="remove all but the newest N")


def run(options: argparse.Namespace) -> int:
    """Return 1 where a checkpoint is damaged, or cannot be deleted on the service; else 0."""
    from rlkit.errors import CheckpointError
    from rlkit.runs import Retention
    from rlkit.runs import checkpoints as records

    folder = Path(options.folder)
    if not (folder / records.CHECKPOINTS).is_dir():
        raise CheckpointError(f"{folder} is not a run: it has no {records.CHECKPOINTS}")
    if not (folder / "run.json").exists() and not records.paths(folder):  # `rlkit train` keeps runs below checkpoints/
        raise CheckpointError(f"{folder} is not a run: it has no run.json, and no checkpoint in {records.CHECKPOINTS}")
    whole, damaged = [], 0
    for path in records.paths(folder):
        try:
            record = records.read(path)
            records.check(record)
        except CheckpointError as error:
            if not path.exists():
                continue  # the run that is writing has removed it
            damaged += 1
            print(f"{path.name}  damaged: {error}")
            continue
        whole.append(record)
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
        print(f"step {record.step:<8} whole  {_size(record):>9}  {numbers}".rstrip())
    if not whole and not damaged:
        print(f"{folder} has no checkpoint yet: call run.checkpoint(policy) at the end of a step")
    if options.export is not None:
        print(*_export(whole, options), sep="\n")
    left = 0 if options.keep is None else _remove(folder, Retention(last=options.keep).expired(whole))
    return 1 if damaged or left else 0


def _remove(folder: Path, spent: Sequence[Record]) -> int:
    """Remove checkpoints; return how many of their states remain on the service."""
    from rlkit.runs import checkpoints as records
    from rlkit.runs.run import acquire_lock

    lock = acquire_lock(folder)
    try:
        elsewhere = []
        for record in spent:
            elsewhere += records.delete_checkpoint(record)
            print(f"removed step {record.step}")
        return _delete(elsewhere) if elsewhere else 0
    finally:
        lock.release()


def _delete(paths: list[str]) -> int:
    """Delete states on the Tinker service that the environment names, and print it; return how many remain."""
    from rlkit.backends.tinker.connection import Address
    from rlkit.backends.tinker.session import Session
    from rlkit.errors import RlkitError

    left = len(paths)
    try:
        session = Session.open(None, Address(), _DEADLINE)
    except RlkitError as error:
        print(*[f"not deleted: {path}" for path in paths], f"since: {error}", sep="\n")
        return left
    for path in paths:
        try:
            session.delete(path).result()
        except RlkitError as error:
            print(f"not deleted: {path}: {error}")
        else:
            left -= 1
            print(f"deleted {path}")
    session.close()
    return left


def _size(record: Record) -> str:
    total = 0
    for role in record.policies:
        path = record.policy(role)
        if path is not None and "://" not in path:
            total += sum(p.stat().st_size for p in Path(path).rglob("*") if p.is_file())
    return f"{total / 1e6:.1f} MB" if total else ""


def _export(whole: list[Record], options: argparse.Namespace) -> list[str]:
    """Return the written folder, and a line for each obstacle to its use by other libraries."""
    from rlkit.errors import CheckpointError, UnsupportedError

    chosen = [record for record in whole if options.step in (None, record.step)]
    path = chosen[-1].policy(options.role) if chosen else None
    if path is None:
        which = "is complete" if options.step is None else f"of step {options.step} is complete"
        raise CheckpointError(f"no checkpoint {which} and has a {options.role!r}")
    if "://" in path:
        raise UnsupportedError(f"{path} is on a service; export it with `tinker checkpoint download`")
    if options.merged:
        from rlkit.backends.local.export import save_merged

        return [save_merged(path, options.export)]
    from rlkit.backends.local.export import save_adapter

    return [options.export, *save_adapter(path, options.export)]
