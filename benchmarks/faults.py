"""A Tinker service in trouble: every kind of fault, before and after the request took effect, at every endpoint.

    python benchmarks/faults.py [--workers 24] [--kinds 503,reset] [--out benchmarks/results/faults.json]

Each cell is a small run (three steps, one of them with a loss that is evaluated here, samples, a save, a resumed run
that goes on) of the Tinker backend on the real SDK, over a service in this process. What is counted is what the
service really carried out beside what the run believes: steps that were taken twice, steps that were lost, completed
runs whose curve is not bit for bit the undisturbed one's, errors that are not rlkit's, calls that end later than their
deadline, and requests per second to a server that stays dead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import rlkit
from rlkit.testing import FakeTinker, Fault

MARGIN = 2.0  # seconds that a call may end after its deadline, on a machine that is busy with other cells
KINDS = ("401", "410", "429", "500", "503", "reset", "timeout", "slow", "bad_json")
RARER = (  # where it trains
    *("400", "402", "403", "404", "408", "409", "422", "502", "empty", "lost", "redirect", "opfail"),
    *("paused_capacity", "paused_rate_limit"),
)
# endpoint, operation of retrieve_future, requests that pass before the first that fails
PLACES = (
    ("create_session", None, 0),
    ("capabilities", None, 0),
    ("create_model", None, 0),
    ("retrieve_future", "create_model", 0),
    ("get_info", None, 0),
    ("forward_backward", None, 1),  # the forward pass of the second step's loss
    ("forward_backward", None, 2),
    ("optim_step", None, 1),
    ("retrieve_future", "forward_backward", 1),
    ("retrieve_future", "forward", 0),
    ("retrieve_future", "optim_step", 1),
    ("save_weights_for_sampler", None, 1),
    ("retrieve_future", "save_weights_for_sampler", 1),
    ("asample", None, 1),
    ("retrieve_future", "sample", 1),
    ("create_sampling_session", None, 0),
    ("save_weights", None, 0),
    ("retrieve_future", "save_weights", 0),
    ("list_run_checkpoints", None, 0),
    ("load_weights", None, 0),
    ("retrieve_future", "load_weights", 0),
    ("finish_session", None, 0),
    ("*", None, 14),  # the whole service, in the middle of the second step
)
TIMES = (1, 3, None)
TRUSTED = "no dedupe, resend=True"  # told to send again to a server that takes it for a new call: nothing can help
PARAMS = rlkit.SamplingParams(max_tokens=4, stop=())
ADAM = rlkit.Adam(learning_rate=0.05)


@attrs.frozen
class Cell:
    """One fault of one service.

    ``dedupe``: it knows a request that comes twice. ``resend``: of connect. ``deadline``: of connect, in seconds; by
    itself long enough for three of the SDK's pauses, and short where the fault stays.
    """

    kind: str
    when: str
    endpoint: str
    operation: str | None
    skip: int
    times: int | None
    dedupe: bool = True
    resend: bool | None = None
    deadline: float = attrs.field(default=attrs.Factory(lambda cell: 15.0 if cell.times else 5.0, takes_self=True))

    @property
    def place(self) -> str:
        forward = "(forward)" if self.endpoint == "forward_backward" and self.skip == 1 else ""
        return self.endpoint + (forward if self.operation is None else f"/{self.operation}")

    def fault(self) -> Fault:
        seconds = 0.4 if self.times or self.kind != "slow" else 2 * self.deadline
        return Fault(
            self.kind,
            self.endpoint,
            when=self.when,  # type: ignore[arg-type]
            times=self.times,
            skip=self.skip,
            operation=self.operation,
            seconds=seconds,
        )


@attrs.define
class Outcome:
    """What became of a cell.

    Attributes:
        curve: losses, gradient norms and tokens, as far as the run came.
        error: class of the first error, "" where the run completed; ``text`` is its message.
        steps: that the run believes in; ``applied``: that the service carried out.
        unknown: the run was told that a step's outcome is not known (StepOutcomeUnknown, or refused after sending).
        doubled: operations that were carried out more than once for one call.
        late: the longest time that a call took beyond its deadline.
        rate: failed requests per second.
    """

    cell: Cell
    curve: list[Any] = attrs.Factory(list)
    error: str = ""
    text: str = ""
    raised: BaseException | None = None
    step_error: str = ""
    steps: int = 0
    applied: int = 0
    unknown: bool = False
    doubled: tuple[str, ...] = ()
    late: float = 0.0
    rate: float = 0.0
    seconds: float = 0.0

    def problems(self, curve: list[Any]) -> list[str]:
        """What the promise forbids; ``curve`` is the undisturbed run's."""
        found = []
        if self.steps > self.applied:
            found.append("lost step")
        if self.applied > self.steps + self.unknown or "optim_step" in self.doubled:
            found.append("double step")
        if "forward_backward" in self.doubled:
            found.append("double gradient")
        if self.curve != curve[: len(self.curve)] or (not self.error and len(self.curve) < len(curve)):
            found.append("another curve")
        if self.error and not issubclass(getattr(rlkit.errors, self.error, Exception), rlkit.RlkitError):
            found.append("untyped error")
        if self.late > MARGIN:
            found.append("late")
        if self.cell.times is None and self.rate >= 5.0:
            found.append("rate")
        return found


def run(cell: Cell) -> Outcome:
    """The cell's run, from connecting to closing."""
    outcome = Outcome(cell)
    started = time.monotonic()
    with FakeTinker(seed=0, dedupe=cell.dedupe, patience=cell.deadline) as fake:
        fake.inject(cell.fault())
        policies: list[Any] = []
        try:
            _loop(outcome, fake, policies)
        except Exception as error:  # noqa: BLE001  # what kind it is, is the question
            outcome.error, outcome.text, outcome.raised = type(error).__name__, str(error), error
        for policy in policies:
            _timed(outcome, policy.close)
        time.sleep(0.05)
        outcome.steps += sum(policy.version for policy in policies[:1])
        outcome.applied = fake.count("optim_step")
        outcome.doubled = tuple(x.operation for x in fake.repeated_operations())
        outcome.rate = _rate(fake)
    outcome.seconds = time.monotonic() - started
    return outcome


def _loop(outcome: Outcome, fake: FakeTinker, policies: list[Any]) -> None:
    connect = {"base_url": fake.base_url, "api_key": fake.api_key, "deadline": outcome.cell.deadline, "seed": 0}
    if outcome.cell.resend is not None:
        connect["resend"] = outcome.cell.resend
    policy = _timed(outcome, lambda: rlkit.connect("tinker", model="toy", **connect))
    policies.append(policy)
    for step in range(3):
        _step(outcome, policy, step)
    base = _read(outcome, policy.base_sampler())
    outcome.curve.append(_read(outcome, base.logprobs([65, 66])).tolist())
    path = _read(outcome, policy.save("end"))
    resumed = _timed(outcome, lambda: rlkit.connect("tinker", resume_from=path, **connect))
    policies.append(resumed)
    try:
        _step(outcome, resumed, 3)
    finally:
        outcome.steps += resumed.version - 3  # those of its own


def _step(outcome: Outcome, policy: Any, step: int) -> None:
    sampler = _read(outcome, policy.sampler())
    samples = _read(outcome, sampler.sample([65, 66, 67], PARAMS, n=2, seed=step))
    data = [s.datum(a) for s, a in zip(samples, (1.0, -0.5), strict=True)]
    gradient = policy.forward_backward(data, _square if step == 1 else "importance_sampling")
    applied = policy.optim_step(ADAM)
    first: BaseException | None = None
    try:
        loss = _read(outcome, gradient).metrics["loss:sum"]
    except Exception as error:  # noqa: BLE001  # the step behind it is read in any case
        first = error
    try:
        norm = _read(outcome, applied)["grad_norm:mean"]
    except Exception as error:  # noqa: BLE001  # as above
        outcome.unknown = isinstance(error, (rlkit.StepOutcomeUnknown, rlkit.TrainerFailed))
        outcome.step_error = type(error).__name__
        raise first or error from None
    if first is not None:
        raise first
    outcome.curve.append([loss, norm, np.concatenate([s.tokens for s in samples]).tolist()])


def _square(logprobs: Any, advantages: Any) -> Any:
    return (logprobs.square() * advantages).sum()


def _read(outcome: Outcome, future: rlkit.Future[Any]) -> Any:
    return _timed(outcome, lambda: future.result(timeout=3 * outcome.cell.deadline))


def _timed(outcome: Outcome, call: Any) -> Any:
    started = time.monotonic()
    try:
        return call()
    finally:
        outcome.late = max(outcome.late, time.monotonic() - started - outcome.cell.deadline)


def _rate(fake: FakeTinker) -> float:
    """Requests per second that failed, from the first to the last one; 0 where that is less than a second."""
    times = [x.time for x in fake.requests if x.fault is not None]
    return (len(times) - 1) / (times[-1] - times[0]) if times and times[-1] - times[0] >= 1.0 else 0.0


def cells(kinds: tuple[str, ...]) -> list[Cell]:
    """The matrix, and where it trains also with a server that takes a repeated call for a new one."""
    when = ("before", "after")
    training = [
        x
        for x in PLACES
        if x[0] in ("forward_backward", "optim_step") or x[1] in ("forward_backward", "optim_step", "sample")
    ]
    found = []
    for times, kind in itertools.product(reversed(TIMES), kinds):
        places = PLACES if kind in KINDS else training
        found += [Cell(kind, x, *place, times) for x, place in itertools.product(when, places)]
        found += [
            Cell(kind, x, *place, times, dedupe=False, resend=resend)
            for x, place, resend in itertools.product(when, training, (None, True))
            if place[0] != "retrieve_future" and kind in KINDS
        ]
    return [x for x in found if _possible(x)]


def _possible(cell: Cell) -> bool:
    """Whether a server can be in such trouble: one that reports a failed operation did nothing."""
    return cell.kind != "opfail" or (cell.endpoint in ("forward_backward", "optim_step") and cell.when == "before")


def undisturbed() -> list[Any]:
    """The curve of a run without a fault."""
    outcome = run(Cell("503", "before", "finish_session", None, 10**6, 1))
    if outcome.error:
        sys.exit(f"the undisturbed run failed: {outcome.error}: {outcome.text}")
    return outcome.curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=24, help="cells at a time; they mostly wait")
    parser.add_argument("--kinds", default=",".join(KINDS + RARER))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "faults.json")
    options = parser.parse_args()
    logging.getLogger("tinker").setLevel(logging.CRITICAL)
    curve = undisturbed()
    work = cells(tuple(options.kinds.split(",")))
    started = time.monotonic()
    outcomes, hung = _all(work, options.workers)
    # A busy machine makes calls late as well; those cells are run once more, a few at a time.
    again = [x.cell for x in outcomes if x.late > MARGIN]
    repeated, hung_again = _all(again, 4)
    outcomes = [x for x in outcomes if x.late <= MARGIN] + repeated
    result = summary(outcomes, hung + hung_again, curve)
    result["repeated_because_late"] = len(again)
    result["seconds"] = round(time.monotonic() - started)
    print(table(result))
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a cell that hangs has a thread that never ends


def _all(work: list[Cell], workers: int) -> tuple[list[Outcome], list[Cell]]:
    """The outcomes, and the cells that had not ended when all others had, and then a while."""
    queue, outcomes, running = iter(work), [], {}
    lock = threading.Lock()

    def worker() -> None:
        while True:
            with lock:
                cell = next(queue, None)
                if cell is None:
                    return
                running[cell] = time.monotonic()
            outcome = run(cell)
            with lock:
                del running[cell]
                outcomes.append(outcome)
                if len(outcomes) % 50 == 0:
                    print(f"{len(outcomes)} of {len(work)}", file=sys.stderr)

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)
            with lock:
                if running and all(time.monotonic() - t > 150 for t in running.values()):
                    return outcomes, list(running)
    return outcomes, list(running)


def summary(outcomes: list[Outcome], hung: list[Cell], curve: list[Any]) -> dict[str, Any]:
    """Counts by group, and a line for each violation."""
    groups: dict[str, Counter[str]] = {}
    lines = [f"{cell}: hang" for cell in hung]
    for outcome in outcomes:
        cell = outcome.cell
        name = ("dedupe" if cell.dedupe else "no dedupe") + ("" if cell.resend is None else f", resend={cell.resend}")
        often = {1: "once", 3: "thrice", None: "always"}[cell.times]
        counts = groups.setdefault(f"{name}: {often}", Counter())
        counts["cells"] += 1
        counts[outcome.error or "completed"] += 1
        for problem in outcome.problems(curve):
            counts[f"VIOLATION {problem}"] += 1
            lines.append(
                f"{name}: {cell.kind} {cell.when} {cell.place} {often}: {problem}: steps {outcome.steps} "
                f"applied {outcome.applied} late {outcome.late:.1f} rate {outcome.rate:.1f} "
                f"{outcome.error} {outcome.text[:200]}"
            )
    rates = [x.rate for x in outcomes if x.cell.times is None]
    return {
        "versions": {name: version(name) for name in ("tinker", "rlkit-lm")},
        "cells": len(outcomes) + len(hung),
        "hangs": len(hung),
        "highest_rate": round(max(rates, default=0.0), 2),
        "groups": {name: dict(sorted(counts.items())) for name, counts in sorted(groups.items())},
        "violations": sorted(line for line in lines if not line.startswith(TRUSTED)),
        "a server that was trusted too much": sorted(line for line in lines if line.startswith(TRUSTED)),
    }


def table(result: dict[str, Any]) -> str:
    """The counts, and what broke the promise."""
    problems = ("double step", "double gradient", "lost step", "another curve", "untyped error", "late", "rate")
    columns = ("cells", "completed", "unknown step", "other error", *problems)
    lines = [f"{'':32}" + "".join(f"{column:>17}" for column in columns)]
    for group, counts in result["groups"].items():
        row = {name.removeprefix("VIOLATION "): count for name, count in counts.items()}
        row["unknown step"] = row.pop("StepOutcomeUnknown", 0)
        row["other error"] = sum(count for name, count in row.items() if hasattr(rlkit, name))
        lines.append(f"{group:32}" + "".join(f"{row.get(column, 0):17}" for column in columns))
    lines += [f"hangs: {result['hangs']}", f"highest rate: {result['highest_rate']} failed requests per second"]
    lines += [f"{len(result['violations'])} violations", *result["violations"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
