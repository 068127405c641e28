"""Task folders in Harbor's form, played with a shell in a sandbox of this machine, without containers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlkit import _check
from rlkit._calls import answered
from rlkit.envs import _sandbox
from rlkit.envs._harbor_task import HarborTask, read
from rlkit.envs._program import Ended
from rlkit.envs._sandbox import Sandbox
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings, check_name
from rlkit.errors import ConfigError, DataError, EnvError
from rlkit.tools import Malformed, error_message, read_calls, tool_message

__all__ = ["harbor"]

_SHELL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a bash command and returns what it writes. Each call is a new shell in the task's folder.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_REWARD = 1 << 16  # bytes of a reward's file


@answered
def harbor(
    folder: str | os.PathLike[str],
    *,
    ignore_image: bool = False,
    readable: Sequence[str | os.PathLike[str]] = (),
    reward_key: str = "reward",
    format: str = "hermes",  # noqa: A002
    max_result: int = 10_000,
    command_timeout: float = 60.0,
    verifier_timeout: float = 600.0,
    split: str = "train",
    name: str = "harbor",
    settings: TaskSettings | None = None,
) -> Tasks:
    """Tasks of Harbor's form (``task.toml``, ``instruction.md``, ``tests/test.sh``), played without containers.

    The policy has a tool ``bash``. Commands run in a sandbox of bubblewrap: the task's folder, which can be written,
    this machine's /usr, read-only, no network, no other process, no variable or file of yours. A turn without a call
    ends the work; then ``tests/test.sh``, which the policy never sees, runs in the same sandbox and writes the reward
    to /logs/verifier/reward.txt or reward.json.

    Args:
        folder: a task's folder, or one of such folders.
        ignore_image: play tasks with this machine's programs, although they want an image, or build one: their tests
            then hold only where the same programs are here. False: such tasks are refused; a Dockerfile may only name
            its base, set WORKDIR and ENV, and COPY into the working folder.
        readable: further folders of this machine, which commands may read, such as that of an interpreter.
        reward_key: which of the values in reward.json.
        format: how the policy writes calls, a name in ``rlkit.tools.formats``.
        max_result: characters of a command's output that the policy is shown, >= 1.
        command_timeout: seconds of one command, > 0; the policy is told when it is ended.
        verifier_timeout: seconds of test.sh, > 0, where task.toml does not say.
        split, name: for metrics.
        settings: what these tasks want to have different.

    A test that writes no reward, or takes too long, fails the episode: it is counted, and not trained.

    Raises:
        ConfigError: nothing can be isolated here, or a task needs an image.
        DataError: there is no task in the folder, or one cannot be read.
    """
    from rlkit.tools.formats import formats

    formats.resolve(format)
    _check.integer("max_result", max_result, low=1)
    _check.real("command_timeout", command_timeout, above=0.0)
    _check.real("verifier_timeout", verifier_timeout, above=0.0)
    place = Path(folder)
    if not place.is_dir():
        raise DataError("folder", f"is {str(folder)!r}", "a folder that exists")
    paths = [place] if (place / "task.toml").exists() else sorted(path.parent for path in place.glob("*/task.toml"))
    if not paths:
        raise DataError("folder", f"{str(place)!r} has no task.toml, and no folder with one", "tasks in Harbor's form")
    more = [Path(path).resolve() for path in readable]
    for path in more:
        if not path.is_dir() or place.resolve().is_relative_to(path):
            raise ConfigError("readable", f"got {str(path)!r}", "folders that exist, and that the tasks are not in")
    tasks = [read(path.resolve(), ignore_image=ignore_image) for path in paths]
    _sandbox.check()

    def make(index: int) -> _Env:
        return _Env(tasks[index], more, reward_key, format, max_result, command_timeout, verifier_timeout)

    return Tasks(make, len(tasks), name=check_name("name", name), split=split, settings=settings)


class _Env:
    """One attempt at a task."""

    def __init__(
        self,
        task: HarborTask,
        readable: Sequence[Path],
        reward_key: str,
        form: str,
        max_result: int,
        command_timeout: float,
        verifier_timeout: float,
    ) -> None:
        self._task = task
        self._readable = readable
        self._key = reward_key
        self._form = form
        self._max_result = max_result
        self._command_timeout = command_timeout
        self._verifier_timeout = task.verifier_timeout or verifier_timeout
        self._root: Path | None = None
        self.tools = [_SHELL]

    def reset(self, seed: int) -> Observation:  # noqa: ARG002  # the folder says which task it is
        self._root = Path(tempfile.mkdtemp(prefix="rlkit-harbor-"))
        work = self._root / "work"
        work.mkdir()
        self._task.prepare(work)
        self._sandbox = Sandbox(self._task.workdir, {self._task.workdir: work}, self._readable, self._task.memory)
        return self._task.instruction

    async def step(self, action: Action) -> StepResult:
        parsed = read_calls(action, self._form, self.tools)
        if not parsed.in_order:
            return await asyncio.to_thread(self._verified)
        messages = []
        for call in parsed.in_order:
            if isinstance(call, Malformed):
                messages.append(error_message(call))
                continue
            command = ["/bin/bash", "-c", str(call.arguments["command"])]
            ended = await asyncio.to_thread(self._run, command)
            messages.append(tool_message(call, self._told(ended)))
        return StepResult(messages, info={"tool_calls": len(parsed.calls), "malformed_calls": len(parsed.errors)})

    def close(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    def _run(self, command: Sequence[str]) -> Ended | None:
        return self._sandbox.run(command, timeout=self._command_timeout, environment=self._task.variables)

    def _told(self, ended: Ended | None) -> str:
        if ended is None:
            return f"The command was ended after {self._command_timeout:g} s."
        text = ended.stdout + ended.stderr
        if len(text) > self._max_result:
            text = text[: self._max_result // 2] + "\n ... (cut) ... \n" + text[-self._max_result // 2 :]
        return text if ended.code == 0 else f"{text}\n(exit code {ended.code})".lstrip()

    def _verified(self) -> StepResult:
        """Run the tests, and read what they wrote."""
        if self._root is None:
            raise EnvError("rlkit.envs.harbor: the environment was not reset")
        tests, logs = self._root / "tests", self._root / "logs"
        shutil.copytree(self._task.path / "tests", tests, symlinks=True)
        logs.mkdir()
        where = f"rlkit.envs.harbor: the tests of {self._task.name!r}"
        ended = self._sandbox.run(
            ["/bin/bash", "/tests/test.sh"],
            timeout=self._verifier_timeout,
            places={"/tests": tests, "/logs/verifier": logs},
            environment=self._task.variables,
        )
        if ended is None:
            raise EnvError(f"{where}: took more than {self._verifier_timeout:g} s")
        texts = {kind: _text(logs / f"reward.{kind}") for kind in ("json", "txt")}
        try:
            value = json.loads(texts["json"])[self._key] if texts["json"] else float(texts["txt"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            said = " ".join((ended.stdout + ended.stderr).split())[-300:]
            raise EnvError(f"{where}: wrote no reward (exit code {ended.code}): {said}") from error
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise EnvError(f"{where}: reward", f"is {_check.shown(value)}", "a finite number")
        return StepResult(reward=float(value), terminated=True, info={"exit_code": ended.code})


def _text(path: Path) -> str:
    """Return a file that the sandbox wrote, "" for none; no link is followed, and no pipe is waited for."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return ""
        return file.read(_REWARD).decode("utf-8", "replace")
