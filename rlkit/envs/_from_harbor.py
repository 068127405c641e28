"""Task folders in Harbor's form, played with a shell in a sandbox of this machine, without containers."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import shlex
import shutil
import stat
import tempfile
import threading
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import cast

import attrs

from rlkit import _check
from rlkit._program import Ended, Program
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings, check_name
from rlkit.errors import ConfigError, DataError, EnvError
from rlkit.tools import ToolCall, formats, read_calls
from rlkit.tools.env import answer_calls

__all__ = ["harbor"]

_ROOT = ("bin", "sbin", "lib", "lib32", "lib64")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_FILE = 1 << 20  # of 512 or 1024 bytes, as the shell counts: the largest file
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def check() -> None:
    """Raise ConfigError where commands cannot be isolated."""
    if shutil.which("bwrap") is None:
        raise ConfigError(
            "rlkit.envs.harbor: bwrap is not on the PATH; tasks run only in isolation: install bubblewrap"
        )
    ended = Sandbox("/tmp", {}).run(["/bin/sh", "-c", "echo isolated"], timeout=30.0)  # noqa: S108  # the sandbox's own
    if ended is None or ended.stdout != "isolated\n":
        said = "no answer" if ended is None else " ".join(ended.stderr.split())[-300:]
        raise ConfigError(f"rlkit.envs.harbor: bwrap cannot isolate commands on this machine: {said}")


@attrs.frozen
class Sandbox:
    """Where commands run: no network, no processes but their own, nothing of this machine but /usr, read-only.

    Attributes:
        folder: in the sandbox, where commands run.
        places: folder in the sandbox -> folder of this machine that is there, and can be written.
        readable: folders of this machine that are where they are, read-only.
        memory: megabytes of one process's address space; None: as many as it wants.
    """

    folder: str
    places: Mapping[str, Path]
    readable: Sequence[Path] = ()
    memory: int | None = None

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        places: Mapping[str, Path] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Ended | None:
        """Run a command to its end, with all that it starts; None where its time was over.

        Args:
            command: the program and its arguments.
            timeout: seconds.
            places: further folders, as of the sandbox.
            environment: variables; no others are there, but PATH, HOME and LANG.
        """
        limits = f"ulimit -f {_FILE}; " + (f"ulimit -v {self.memory * 1024}; " if self.memory is not None else "")
        inner = ["/bin/sh", "-c", limits + 'exec "$@"', "sh", *command]
        program = Program(
            [*self._arguments({**self.places, **(places or {})}, environment or {}), "--", *inner],
            environment={"PATH": os.environ.get("PATH", _PATH)},
        )
        late = threading.Event()

        def stop() -> None:
            late.set()
            program.kill(grace=0.0)

        timer = threading.Timer(timeout, stop)
        timer.daemon = True
        timer.start()
        try:
            ended = program.run()
        finally:
            timer.cancel()
        return None if late.is_set() else ended

    def _arguments(self, places: Mapping[str, Path], environment: Mapping[str, str]) -> list[str]:
        made = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        made += ["--uid", "1000", "--gid", "1000", "--ro-bind", "/usr", "/usr"]
        for name in _ROOT:
            path = Path("/", name)
            if path.is_symlink():
                made += ["--symlink", str(path.readlink()), str(path)]
            elif path.is_dir():
                made += ["--ro-bind", str(path), str(path)]
        for name in _ETC:
            made += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        made += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]  # noqa: S108  # the sandbox's own
        for folder in self.readable:
            made += ["--ro-bind", str(folder), str(folder)]
        for inside, outside in places.items():
            made += ["--bind", str(outside), inside]
        made += ["--chdir", self.folder, "--clearenv"]
        variables = {"PATH": _PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **environment}  # noqa: S108
        for name, value in variables.items():
            made += ["--setenv", name, value]
        return made


_HARMLESS = ("FROM", "WORKDIR", "COPY", "ENV", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "SHELL", "ARG", "STOPSIGNAL")


@attrs.frozen
class HarborTask:
    """One task.

    Attributes:
        path: its folder.
        instruction: what is to be done.
        workdir: where it is done, in the sandbox.
        copies: (source in ``environment/``, destination in the sandbox) that its image would have.
        variables: of its image and its environment.
        verifier_timeout: seconds; None: it does not say.
        memory: megabytes; None: it does not say.
    """

    path: Path
    instruction: str
    workdir: str
    copies: tuple[tuple[str, str], ...]
    variables: Mapping[str, str]
    verifier_timeout: float | None
    memory: int | None

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return self.path.name

    def prepare(self, folder: Path) -> None:
        """Fill the folder that will be ``workdir`` with what the image would have there."""
        for source, destination in self.copies:
            inside = PurePosixPath(self.workdir, destination).relative_to(self.workdir)
            origin = self.path / "environment" / source.lstrip("/")  # as of the image's context
            target = folder / inside
            if origin.is_dir():
                shutil.copytree(origin, target, symlinks=True, dirs_exist_ok=True)
                continue
            target = target / origin.name if destination.endswith(("/", ".")) or target.is_dir() else target
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin, target, follow_symlinks=False)


def read(path: Path, *, ignore_image: bool) -> HarborTask:
    """Read a task folder.

    Raises:
        DataError: a part is missing, or cannot be read.
        ConfigError: it needs an image, and ``ignore_image`` is False.
    """
    for part in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (path / part).is_file():
            raise DataError(str(path), f"has no {part}", "a task folder in Harbor's format")
    try:
        told = tomllib.loads((path / "task.toml").read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path / 'task.toml'}: {error}") from error
    environment, verifier = _table(told, "environment"), _table(told, "verifier")
    image = environment.get("docker_image")
    if image is not None and not ignore_image:
        _refuse(path, f"needs the image {image!r}")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (path / "environment" / name).exists():
            raise ConfigError(str(path), f"has environment/{name}", "a task without services of containers")
    workdir, copies, variables = _image(path, ignore_image=ignore_image)
    variables |= {str(k): str(v) for k, v in _table(environment, "env").items()}
    timeout, memory = verifier.get("timeout_sec"), environment.get("memory_mb")
    return HarborTask(
        path,
        (path / "instruction.md").read_text("utf-8"),
        workdir,
        tuple(copies),
        variables,
        float(timeout) if isinstance(timeout, (int, float)) else None,
        int(memory) if isinstance(memory, (int, float)) else None,
    )


def _table(told: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = told.get(name)
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def _refuse(path: Path, what: str) -> None:
    why = "rlkit does not run containers; ignore_image=True plays it with this machine's programs"
    raise ConfigError(str(path), what, "a task that needs no image", why)


def _image(path: Path, *, ignore_image: bool) -> tuple[str, list[tuple[str, str]], dict[str, str]]:
    """Return the folder, the copies and the variables that a Dockerfile names; refuse one that does more."""
    workdir, copies, variables = "/app", list[tuple[str, str]](), dict[str, str]()
    dockerfile = path / "environment" / "Dockerfile"
    if not dockerfile.is_file():
        return workdir, copies, variables
    for line in map(str.strip, dockerfile.read_text("utf-8").replace("\\\n", " ").splitlines()):
        if line[:1] in ("", "#"):
            continue
        word, _, rest = line.partition(" ")
        word = word.upper()
        if word not in _HARMLESS and not ignore_image:
            _refuse(path, f"runs {line[:60]!r} in its Dockerfile")
        if word == "WORKDIR":
            workdir = str(PurePosixPath(workdir, rest.strip()))
        if word == "ENV" and "=" in rest:
            variables |= dict(part.split("=", 1) for part in shlex.split(rest) if "=" in part)
        if word == "COPY":
            copied = _read_copy(rest, workdir)
            if not copied and not ignore_image:
                _refuse(path, f"has a COPY that rlkit does not support: {line[:60]!r}")
            copies += copied
    if PurePosixPath(workdir).parts[:2] in _TAKEN:
        raise ConfigError(str(path), f"works in {workdir}", "a separate folder, such as /app")
    return workdir, copies, variables


_TAKEN = (("/",), ("/", "usr"), ("/", "proc"), ("/", "dev"), ("/", "tests"), ("/", "logs"))


def _read_copy(rest: str, workdir: str) -> list[tuple[str, str]]:
    """Return (source, target) of what a line copies into the folder; none where it does more."""
    *sources, target = shlex.split(rest) or [""]
    named = any(part.startswith("--") for part in (*sources, target))
    inside = PurePosixPath(workdir, target).is_relative_to(workdir) and ".." not in rest
    return [(source, target) for source in sources] if inside and not named else []


_SHELL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a bash command and returns what it writes. Each call is a new shell in the task's folder.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_REWARD = 1 << 16  # bytes of a reward's file


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
    """Return tasks of Harbor's form (``task.toml``, ``instruction.md``, ``tests/test.sh``), played without containers.

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
    formats.resolve(format)
    _check.integer("max_result", max_result, low=1)
    _check.real("command_timeout", command_timeout, above=0.0)
    _check.real("verifier_timeout", verifier_timeout, above=0.0)
    place = Path(folder)
    if not place.is_dir():
        raise DataError("folder", f"is {str(folder)!r}", "a folder that exists")
    paths = [place] if (place / "task.toml").exists() else sorted(path.parent for path in place.glob("*/task.toml"))
    if not paths:
        raise DataError("folder", f"{str(place)!r} has no task.toml, nor a folder with one", "tasks in Harbor's format")
    more = [Path(path).resolve() for path in readable]
    for path in more:
        if not path.is_dir() or place.resolve().is_relative_to(path):
            raise ConfigError("readable", f"got {str(path)!r}", "folders that exist and do not contain the tasks")
    tasks = [read(path.resolve(), ignore_image=ignore_image) for path in paths]
    check()

    def make(index: int) -> _Env:
        task = tasks[index]
        testing = task.verifier_timeout or verifier_timeout
        return _Env(task, more, reward_key, format, max_result, command_timeout, testing)

    return Tasks(make, len(tasks), name=check_name("name", name), split=split, settings=settings)


@attrs.define(eq=False, repr=False)
class _Env:
    """One attempt at a task."""

    _task: HarborTask
    _readable: Sequence[Path]
    _key: str
    _form: str
    _max_result: int
    _command_timeout: float
    _verifier_timeout: float
    tools: list[Mapping[str, object]] = attrs.field(factory=lambda: [_SHELL], init=False)
    _root: Path | None = attrs.field(default=None, init=False)
    _sandbox: Sandbox = attrs.field(init=False)

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
        return await answer_calls(parsed, self._call)

    def close(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    async def _call(self, call: ToolCall) -> str:
        command = ["/bin/bash", "-c", str(call.arguments["command"])]
        run = functools.partial(self._sandbox.run, timeout=self._command_timeout, environment=self._task.variables)
        ended = await asyncio.to_thread(run, command)
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
            raise EnvError(f"{where}: the tests wrote no reward (exit code {ended.code}): {said}") from error
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise EnvError(f"{where}: reward", f"is {_check.describe(value)}", "a finite number")
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
