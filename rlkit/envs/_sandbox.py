"""Commands that see this machine's programs and one folder, and nothing else: bubblewrap, without a container."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from rlkit.envs._program import Ended, Program
from rlkit.errors import ConfigError

_ROOT = ("bin", "sbin", "lib", "lib32", "lib64")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_FILE = 1 << 20  # of 512 or 1024 bytes, as the shell counts: the largest file
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def check() -> None:
    """Raise ConfigError where commands cannot be isolated."""
    if shutil.which("bwrap") is None:
        raise ConfigError(
            "rlkit.envs.harbor: bwrap is not on the PATH; tasks are only run isolated: install bubblewrap"
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
