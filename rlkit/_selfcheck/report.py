"""The report of a self-check, as JSON and as text, without names of hosts, users or folders."""

from __future__ import annotations

import getpass
import json
import platform
import re
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attrs
import torch

__all__ = ["Check", "Report", "machine", "processor", "scrubbed"]

TITLES = {
    "roofline": "Limits of the device, measured on large products and copies",
    "launches": "Operations of one decoder layer of rlkit's forward, each of them a kernel launch on a GPU",
    "speed": "Speed of a {shape} model with random weights, and its share of the device's limits",
}
NUMBERS = (
    "Tiny models with random weights compute the same in two ways each, which must be about equal. Apart is the",
    "logprob that differs most (in bfloat16 the mean of all), or a gradient as part of its norm.",
)
PACKAGES = ("rlkit-lm", "torch", "transformers", "peft", "accelerate")


@attrs.frozen
class Check:
    """A number that must be small: the distance between two ways to compute the same.

    Attributes:
        name: what is compared with what.
        otherwise: what it means for a user if they differ.
        of: the model and the dtype that it was found for.
        value: the measured distance, None where it failed or was left out.
        bound: its upper bound.
        note: why there is no value.
    """

    name: str
    otherwise: str
    of: str
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

    def text(self) -> str:
        """Return one line of text."""
        verdict = {True: "ok", False: "WRONG", None: "-"}[self.right]
        apart = self.note if self.value is None else f"{self.value:.2g} apart (at most {self.bound:.2g})"
        return f"  {verdict:6} {self.of}: {'equal' if self.value == 0 else apart}"


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
        """Return lines of text."""
        lines = [f"{key:15} {value}" for key, value in self.machine.items()]
        if self.checks:
            lines += ["", *NUMBERS]
        for name in dict.fromkeys(check.name for check in self.checks):
            checks = [check for check in self.checks if check.name == name]
            lines += ["", f"{name[0].upper()}{name[1:]}", f"  (else: {checks[0].otherwise})"]
            lines += [check.text() for check in checks]
        for title, part in self.parts.items():
            lines += ["", TITLES[title].format(shape=self.shape)]
            lines += [f"  {name}: {_shown(name, value)}" for name, value in part.items()]
        verdict = "all numbers are right" if self.right else "NOT all numbers are right, or not all were tried"
        return "\n".join([*lines, "", f"{verdict}; {self.seconds:.0f} s"])


def _shown(name: str, value: object) -> str:
    """Return a value with its unit, which its name determines.

    >>> _shown("float32 operations per second", 1.16e10), _shown("peak bytes, loaded", 462155776)
    ('11.6 billion', '462 million')
    >>> _shown("decoding 8 rows", {"tokens per second": 543.7, "of the memory's limit": 0.03})
    "tokens per second 544, of the memory's limit 3 %"
    """
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(key, x)}" for key, x in value.items())
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if "limit" in name:
        return f"{100 * value:.2g} %"
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def machine(device: torch.device) -> dict[str, object]:
    """Return the device and the versions, without anything that identifies the owner."""
    found: dict[str, object] = {"device": device.type, "system": f"{platform.system()} {platform.machine()}"}
    if device.type == "cuda":
        found["name"] = torch.cuda.get_device_name(device)
        found["memory"] = torch.cuda.get_device_properties(device).total_memory
        found["cuda"] = torch.version.cuda
    else:
        found["processor"] = processor() if device.type == "cpu" else platform.machine()
        found["threads"] = torch.get_num_threads()
    found["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this machine's processor: what Linux says of it, else what the platform calls it."""
    try:
        told = re.search(r"^model name\s*:\s*(.*\S)", cpuinfo.read_text("utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        told = None
    return told[1] if told else platform.processor() or platform.machine()


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
