"""An environment for each client, made once, with the versions that it was tried with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = sorted(path.stem for path in (HERE / "requirements").glob("*.txt"))
NODE = {
    "opencode": "opencode-ai@1.18.33",
    "codex": "@openai/codex@0.169.0",
    "claude-code": "@anthropic-ai/claude-code@2.1.197",
}
KEPT = {"LANG", "TMPDIR"}


def variables(home: Path) -> dict[str, str]:
    """Return what a program finds around it: nothing of this user's."""
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name in KEPT}
    return kept | {"HOME": str(home), "PATH": os.environ["PATH"]}


def made(folder: Path, name: str) -> Path:
    """Return the folder with the programs of an environment; where it is not there yet, it is made."""
    place = folder / name
    if name in NODE:
        bin_folder, stamp = place / "node_modules" / ".bin", NODE[name]
    else:
        bin_folder, stamp = place / "bin", (HERE / "requirements" / f"{name}.txt").read_text("utf-8")
    ready = place / "ready"
    if ready.is_file() and ready.read_text("utf-8") == stamp:
        return bin_folder
    place.mkdir(parents=True, exist_ok=True)
    if name in NODE:
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(place), stamp]
    else:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(bin_folder / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        install = [*pip, "-r", str(HERE / "requirements" / f"{name}.txt")]
    subprocess.run(install, check=True, timeout=900)
    ready.write_text(stamp, "utf-8")
    return bin_folder
