"""A task folder in Harbor's form, and what of it can be had without its container."""

from __future__ import annotations

import shlex
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import cast

import attrs

from rlkit.errors import ConfigError, DataError

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
        """Of its folder."""
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
            raise DataError(str(path), f"has no {part}", "a task folder in Harbor's form")
    try:
        told = tomllib.loads((path / "task.toml").read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path / 'task.toml'}: {error}") from error
    environment, verifier = _table(told, "environment"), _table(told, "verifier")
    image = environment.get("docker_image")
    if image is not None and not ignore_image:
        _refuse(path, f"wants the image {image!r}")
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
    why = "there are no containers here; ignore_image=True plays it with this machine's programs"
    raise ConfigError(str(path), what, "a task that needs no image of its own", why)


def _image(path: Path, *, ignore_image: bool) -> tuple[str, list[tuple[str, str]], dict[str, str]]:
    """Return the folder, the copies and the variables that a Dockerfile names; refuse one that does more."""
    workdir, copies, variables = "/app", list[tuple[str, str]](), dict[str, str]()
    dockerfile = path / "environment" / "Dockerfile"
    if not dockerfile.is_file():
        return workdir, copies, variables
    for line in dockerfile.read_text("utf-8").replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        word = word.upper()
        if not word or word.startswith("#"):
            continue
        if word not in _HARMLESS and not ignore_image:
            _refuse(path, f"runs {line.strip()[:60]!r} in its Dockerfile")
        if word == "WORKDIR":
            workdir = str(PurePosixPath(workdir, rest.strip()))
        if word == "ENV" and "=" in rest:
            variables |= dict(part.split("=", 1) for part in shlex.split(rest) if "=" in part)
        if word == "COPY":
            parts = shlex.split(rest)
            inside = [PurePosixPath(workdir, part) for part in parts[-1:]]
            named = [part for part in parts if part.startswith("--")]
            good = len(parts) > 1 and not named and inside[0].is_relative_to(workdir) and ".." not in rest
            if good:
                copies += [(source, parts[-1]) for source in parts[:-1]]
            elif not ignore_image:
                _refuse(path, f"copies to where it cannot here: {line.strip()[:60]!r}")
    if PurePosixPath(workdir).parts[:2] in (
        ("/",),
        ("/", "usr"),
        ("/", "proc"),
        ("/", "dev"),
        ("/", "tests"),
        ("/", "logs"),
    ):
        raise ConfigError(str(path), f"works in {workdir}", "a folder of its own, such as /app")
    return workdir, copies, variables
