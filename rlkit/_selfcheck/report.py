"""What a self-check found: as JSON and as text, without names of hosts, users or folders."""

from __future__ import annotations

import getpass
import json
import platform
import re
import socket
from importlib.metadata import PackageNotFoundError, version

import attrs
import torch

__all__ = ["Check", "Report", "machine", "scrubbed"]

PACKAGES = ("rlkit-lm", "torch", "transformers", "peft", "accelerate")


@attrs.frozen
class Check:
    """A number that must be small.

    Attributes:
        value: what was found, None where it failed or was left out.
        bound: what it may be.
        note: why there is no value.
    """

    name: str
    value: float | None
    bound: float | None
    note: str = ""
    failed: bool = False

    @property
    def right(self) -> bool | None:
        """Whether it passed; None where it was left out."""
        if self.value is None or self.bound is None:
            return False if self.failed else None
        return self.value <= self.bound


@attrs.define
class Report:
    """See ``rlkit._selfcheck.self_check``.

    Attributes:
        machine: device and versions.
        shape: of the model whose speed was measured.
        checks: of numbers.
        parts: "roofline", "launches" and "speed".
        seconds: how long all took.
    """

    machine: dict[str, object]
    shape: str
    checks: list[Check] = attrs.field(factory=list)
    parts: dict[str, dict[str, object]] = attrs.field(factory=dict)
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether all checks of numbers were made, and passed."""
        return bool(self.checks) and all(check.right for check in self.checks)

    def json(self) -> str:
        """Return all of it as JSON."""
        checks = [{**attrs.asdict(check), "right": check.right} for check in self.checks]
        return json.dumps({**attrs.asdict(self), "right": self.right, "checks": checks}, indent=1) + "\n"

    def text(self) -> str:
        """Return lines to read."""
        lines = [f"{key:15} {value}" for key, value in self.machine.items()]
        for check in self.checks:
            verdict = {True: "ok", False: "WRONG", None: "-"}[check.right]
            number = check.note if check.value is None else f"{check.value:.2g} (at most {check.bound:.2g})"
            lines.append(f"{verdict:6} {check.name}: {number}")
        for title, part in self.parts.items():
            lines += [f"{title}: {name}: {_shown(value)}" for name, value in part.items()]
        verdict = "all numbers are right" if self.right else "NOT all numbers are right, or not all were tried"
        return "\n".join([*lines, f"{verdict}; {self.seconds:.0f} s"])


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(x)}" for key, x in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def machine(device: torch.device) -> dict[str, object]:
    """Return what device and versions are, and nothing that names whose they are."""
    found: dict[str, object] = {"device": device.type, "system": f"{platform.system()} {platform.machine()}"}
    if device.type == "cuda":
        found["name"] = torch.cuda.get_device_name(device)
        found["memory"] = torch.cuda.get_device_properties(device).total_memory
        found["cuda"] = torch.version.cuda
    else:
        found["name"] = platform.processor() or platform.machine()
        found["threads"] = torch.get_num_threads()
    found["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def scrubbed(text: str) -> str:
    """Return ``text`` in one line without paths, and without the names of host and user.

    >>> scrubbed("OSError: /home/me/model is no folder")
    'OSError: <path> is no folder'
    """
    text = re.sub(r"(?:[A-Za-z]:)?(?:[\\/][^\s'\":;,()]+)+", "<path>", " ".join(text.split()))
    for name in {socket.gethostname(), *_user()} - {""}:
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text[:500]


def _user() -> list[str]:
    try:
        return [getpass.getuser()]
    except (OSError, KeyError, ImportError):
        return []
