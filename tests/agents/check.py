"""Runs agents that others wrote, as they come, against a gateway.

    python -m tests.agents.check                       # everything; make test-agents
    python -m tests.agents.check --list                # the names
    python -m tests.agents.check langgraph smolagents/code
    python -m tests.agents.check --model smollm2-135m-instruct [--free] langgraph

Each client has an environment of its own, which is made on its first use. The policy says what each case tells it to,
with the logprobs of the toy. When an agent has ended: it ended well and said what it should; the turns and branches are
those that the case names; every sampled token is in exactly one datum; and the logprobs of the datums are the policy's.
With ``--model`` the tokenizer and the logprobs are those of a local model; with ``--free`` it says what it wants, and
the agents may fail at their task.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

import rlkit
from rlkit.backends.protocol import TrainerBackend
from rlkit.gateway import Gateway, Session
from rlkit.trajectory import datums
from tests.agents.cases import CASES, Case
from tests.agents.environments import HERE, NODE, made, variables
from tests.agents.policy import Told
from tests.agents.recorder import Recorder

ROOT = HERE.parents[1]
SECONDS = 180  # that one agent may take
LENGTH = 2**18  # tokens of the toy's context


@attrs.frozen
class Ended:
    """What is left of an agent."""

    status: int
    output: str


def run(case: Case, session: Session, bin_folder: Path, work: Path, *, free: bool) -> Ended:
    """Run an agent to its end, or to the end of its time."""
    for name, text in case.files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(fill(text, session, work), "utf-8")
    environment = variables(work / "home") | session.environment()
    environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    environment |= {"TURNS": "3"} if free else {}
    environment |= {name: fill(text, session, work) for name, text in case.variables.items()}
    with (work / "output").open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [fill(part, session, work) for part in case.command],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Ended(status, output.read())


def fill(text: str, session: Session, work: Path) -> str:
    """Put the session's addresses into a text."""
    known = {"url": session.base_url, "root": session.root_url, "key": session.api_key, "model": session.model}
    for name, value in {**known, "clients": str(HERE / "clients"), "work": str(work)}.items():
        text = text.replace("{" + name + "}", value)
    return text


def problems(
    case: Case, session: Session, ended: Ended, told: Told, policy: TrainerBackend, work: Path, *, free: bool
) -> list[str]:
    """Return what is not as it is to be."""
    wrong = [] if ended.status == 0 else [f"it ended with status {ended.status}"]
    if free:
        return wrong + untrue(session, told.samples, policy)
    if case.result not in ended.output:
        wrong.append(f"{case.result!r} is not in its output")
    for name, text in case.wanted.items():
        if not (work / name).is_file() or text not in (work / name).read_text("utf-8"):
            wrong.append(f"{text!r} is not in {name}")
    counts = (len(session.turns), len(session.branches))
    if counts != (case.turns, case.branches):
        wrong.append(f"{counts[0]} turns in {counts[1]} branches; expected {case.turns} in {case.branches}")
    if session.metrics["rewritten"] != case.rewritten:
        wrong.append(f"{session.metrics['rewritten']} requests were rewritten; expected {case.rewritten}")
    return wrong + untrue(session, told.samples, policy)


def untrue(session: Session, samples: Sequence[rlkit.Sample], policy: TrainerBackend) -> list[str]:
    """Return what is wrong with the datums of a session: tokens that are not as sampled, or logprobs that are not."""
    wrong = []
    data = datums(session.trajectory(1.0), 1.0, split="allow")
    if not data:
        return ["nothing was sampled"]
    sampled = Counter((int(t), float(p)) for s in samples for t, p in zip(s.tokens, s.logprobs, strict=True))
    trained: Counter[tuple[int, float]] = Counter()
    for datum in data:
        logprobs = np.asarray(datum.inputs["sampling_logprobs"])
        pairs = zip(datum.tokens[datum.mask].tolist(), logprobs[datum.mask].tolist(), strict=True)
        trained.update((int(token), float(logprob)) for token, logprob in pairs)
    if trained != sampled:
        wrong.append(f"{sum((sampled - trained).values())} sampled tokens are missing, others {trained - sampled}")
    selected = policy.forward(data).result().selected
    for datum, logprobs in zip(data, selected, strict=True):
        wanted = np.asarray(datum.inputs["sampling_logprobs"])[datum.mask]
        apart = np.abs(np.asarray(logprobs) - wanted) / np.maximum(1, np.abs(wanted))  # what is told may be improbable
        if apart.size and apart.max() > 1e-5:
            wrong.append(f"logprobs are {apart.max():.2e} apart")
    return wrong


def check(case: Case, policy: TrainerBackend, folder: Path, work: Path, free: bool) -> tuple[str, list[str], str]:
    """Run a case; return what is known of it, what is wrong, and the output."""
    bin_folder = made(folder, case.environment)
    work.mkdir(parents=True)
    with policy.sampler().result() as sampler:
        told = Told(sampler, None if free else case.say)
        params = rlkit.SamplingParams(max_tokens=48 if free else 4096)
        with Gateway(told, params=params) as gateway, gateway.session() as session:
            ended = run(case, session, bin_folder, work, free=free)
            wrong = problems(case, session, ended, told, policy, work, free=free)
            return json.dumps(session.metrics), wrong, ended.output


def main() -> int:
    """1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of cases or clients; none: all")
    parser.add_argument("--list", action="store_true", help="shows the names")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-agents", help="of the environments")
    parser.add_argument("--keep", type=Path, help="a folder for what the agents write, which is left there")
    parser.add_argument("--model", help="a local model, for its tokenizer and its logprobs (default: the toy)")
    parser.add_argument("--free", action="store_true", help="the policy says what it wants")
    parser.add_argument("--record", type=Path, help="a folder for what the agents post")
    options = parser.parse_args()
    if options.list:
        print(*(case.name for case in CASES), sep="\n")
        return 0
    known = {case.name for case in CASES} | {case.name.partition("/")[0] for case in CASES}
    if unknown := set(options.names) - known:
        parser.error(f"no case or client named {', '.join(sorted(unknown))}")
    names = set(options.names or known)
    chosen = [case for case in CASES if case.name in names or case.name.partition("/")[0] in names]
    if shutil.which("npm") is None:
        print("skipped, since there is no npm:", *(case.name for case in chosen if case.environment in NODE))
        chosen = [case for case in chosen if case.environment not in NODE]
    recorder, failures = Recorder() if options.record else None, 0
    if options.model:
        policy: TrainerBackend = rlkit.connect("local", model=options.model, seed=0)
    else:
        policy = rlkit.connect("toy", seed=0, max_length=LENGTH)
    with tempfile.TemporaryDirectory(prefix="rlkit-agents-") as temporary, policy:
        for case in chosen:
            began, work = time.monotonic(), (options.keep or Path(temporary)).resolve() / case.name.replace("/", "-")
            shutil.rmtree(work, ignore_errors=True)
            counts, wrong, output = check(case, policy, options.folder.resolve(), work, options.free)
            print(
                f"{'FAILED' if wrong else 'ok':7}{case.name:32}{time.monotonic() - began:5.0f} s  {counts}", flush=True
            )
            if recorder is not None:
                recorder.write(options.record / f"{work.name}.json")
            if wrong:
                failures += 1
                print(*(f"  {each}" for each in wrong), output[-3000:], sep="\n", flush=True)
    print(f"\n{len(chosen) - failures} of {len(chosen)}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
