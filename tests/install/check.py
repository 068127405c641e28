"""Installs rlkit into empty environments, as users would, and uses what was installed.

    python tests/install/check.py                  # everything, two environments at a time; make test-install
    python tests/install/check.py --list           # the names
    python tests/install/check.py readme           # the lines of README.md in a copy of the tree, examples, notebooks
    python tests/install/check.py core tinker      # the wheel alone, and with one extra

An environment has the wheel with the core or with one extra, and programs.py uses what that extra promises; or it has
what a page's own lines install. The working tree cannot be imported from the former. A line that failed is shown with
its output, and the environments are removed unless ``--keep FOLDER`` says where they are to stay.

README's environment is made as a user makes it, and pip unpacks there everything that the extra ``all`` requires. The
others begin with hard links to the files of those distributions that their extras require, too; pip finds them
installed, and replaces what its constraints do not allow.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import importlib.metadata
import itertools
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs.py")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
INSTALLED = {canonicalize_name(each.name) for each in importlib.metadata.distributions()}
TRACKERS = {"wandb": [], "tensorboard": ["tensorboard"], "trackio": [], "mlflow": []}  # and what reads what they wrote
UNPINNED = {"gem", "mcp", "trackio"}  # whose own pins are older than those of constraints.txt, or newer
NOT_ALONE = {"all", "data", "docs", "test"}  # README's lines install the first; data is of recipes
SECONDS = 1800  # one line, on a machine that is busy

# What README's and the pages' lines must be able to run. Small settings.
EXAMPLES = """
python examples/quickstart.py --steps 1 --prompts 2 --samples 4 --eval-size 4 --out runs/local
python examples/quickstart.py --backend toy --steps 2 --prompts 2 --samples 2 --eval-size 4 --out runs/toy
python examples/algorithms.py --steps 2
python examples/async_grpo.py --steps 2
python examples/config_driven.py examples/configs/digits.yaml buffer.total_steps=2
python examples/custom_env.py --steps 1
python examples/custom_loss.py
python examples/distill.py max_steps=2 folder=runs/distill
python examples/dpo.py max_steps=2 folder=runs/dpo
python examples/sft.py max_steps=2 folder=runs/sft
python examples/hosted.py --fake --steps 2
python examples/multi_turn.py --steps 1
rlkit train examples/configs/chain_sum.yaml --check
rlkit doctor --offline
rlkit report runs/toy
"""
SERVED = """
python examples/plain_sdk/grpo.py smollm2-135m-instruct --steps 1 --samples 2
python examples/plain_sdk/supervised.py smollm2-135m-instruct --steps 1
python examples/plain_sdk/resume.py smollm2-135m-instruct --steps 1
python examples/plain_sdk/custom_loss.py smollm2-135m-instruct --steps 1
"""
GEM = """
python examples/guess_the_number.py --model toy --steps 1 --episodes 4 --folder runs/guess
python examples/gem.py backend=toy max_steps=1 batch_size=4 num_env=2 log_dir=runs/gem
"""


def read_requirements(name: str, extra: str) -> list[str]:
    """Return what a distribution requires: rlkit by its pyproject.toml, others as they are installed here."""
    if name == PROJECT["name"]:
        return EXTRAS[extra] if extra else PROJECT["dependencies"]
    return importlib.metadata.requires(name) or []


@functools.cache
def find_required(extras: tuple[str, ...]) -> frozenset[str]:
    """Return the names of what is installed here that rlkit with these extras requires, directly or not."""
    pending, found = [(PROJECT["name"], extra) for extra in ("", *extras)], set()
    while pending:
        if (pair := pending.pop()) in found:
            continue
        found.add(pair)
        for each in map(Requirement, read_requirements(*pair)):
            if each.marker is None or each.marker.evaluate({"extra": pair[1]}):
                name = canonicalize_name(each.name)
                if name in INSTALLED | {PROJECT["name"]}:
                    pending += [(name, extra) for extra in ("", *each.extras)]
    return frozenset(name for name, _ in found) - {PROJECT["name"]}


class Environment:
    """An empty environment in a folder, and lines of shell that run in it as after ``activate``.

    Args:
        folder: which it makes.
        whole: with the pip that ``venv`` unpacks; otherwise with links to this Python's.
    """

    def __init__(self, folder: Path, *, whole: bool) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        without = [] if whole else ["--without-pip"]
        subprocess.run([sys.executable, "-m", "venv", *without, str(folder / "venv")], check=True)
        if not whole:
            self.link(["pip"])
            script = folder / "venv" / "bin" / "pip"
            script.write_text(f"#!/bin/sh\nexec '{script.with_name('python')}' -m pip \"$@\"\n")
            script.chmod(0o755)
        kept = {"HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"}
        self.variables = {k: v for k, v in os.environ.items() if k in kept or k.startswith(("PIP_", "HTTP", "http"))}
        self.variables |= {"PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}", "MPLBACKEND": "Agg"}
        self.variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRACKIO_DIR": str(folder), "PIP_QUIET": "1"}
        self.variables |= {"PIP_NO_COMPILE": "1"}  # what is not imported

    def link_required(self, *extras: str) -> None:
        """Link what rlkit with these extras requires; what the extra ``all`` does not is left to pip."""
        self.link(find_required(extras) & find_required(("all",)))

    def link(self, names: Iterable[str]) -> None:
        """Link the modules, bytecode and metadata of distributions that are installed here, and none of their scripts.

        Nothing writes into a linked file: pip removes a file and Python renames bytecode over it.
        """
        (packages,) = (self.folder / "venv").glob("lib/python*/site-packages")
        for name in names:
            for file in importlib.metadata.files(name) or []:
                if file.parts[0] != ".." and (source := Path(file.locate())).is_file():
                    target = packages / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    try:
                        os.link(source, target)
                    except FileExistsError:  # several distributions list bytecode of one folder
                        continue
                    except OSError:  # another file system
                        shutil.copy2(source, target)

    def run(self, line: str, **variables: str) -> None:
        """Runs the line in bash in the folder ``work``; raises with its output where it fails."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.work,
            env=self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"$ {line}\n{done.stdout.strip()}\n(status {done.returncode})")


def install_lines(page: str) -> list[str]:
    """The lines of a page's sh blocks that begin with ``pip install``, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("pip install")]


def copied(target: Path) -> None:
    """The tree as a clone has it: what git knows or would add."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def readme(place: Environment, _: Path) -> None:
    """README's lines and its program, then all extras and every example, gem.py with its own line, first_hour.py."""
    copied(place.work)
    for line in install_lines("README.md"):
        place.run(line)
    program = re.search(
        r"^```python no-run\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )[1]
    place.run(f"python - <<'END'\n{program}END\nrlkit report runs/sums")
    place.run(next(line for line in install_lines("docs/programs.md") if "[all]" in line))
    for line in EXAMPLES.strip().splitlines():
        place.run(line)
    with served(place, "rlkit serve --model smollm2-135m-instruct") as address:
        for line in SERVED.strip().splitlines():
            place.run(line, **address)
    place.run(next(line for line in install_lines("docs/agents.md") if "openai" in line))
    place.run("python examples/agent.py warm_up=1 max_steps=1 n=2 folder=runs/agent")
    place.run(next(line for line in install_lines("docs/environments.md") if "gem-llm" in line))
    for line in GEM.strip().splitlines():
        place.run(line)
    place.run("pip install -e '.[tensorboard]' -c constraints.txt")
    place.run("python -P tests/install/first_hour.py smollm2-135m-instruct")


def notebooks(place: Environment, _: Path) -> None:
    """Each notebook is made after the lines of its page, in the kernel that a reader has."""
    copied(place.work)
    for page in ("tutorial", "swap"):
        lines = install_lines(f"docs/{page}.md")
        if not lines:
            raise AssertionError(f"{page} names no pip install")
        place.link_required(*re.findall(r"\w+", re.search(r"\[(.*?)\]", lines[0])[1]))
        for line in lines:
            place.run(line)
        place.run("pip install jupytext nbconvert ipykernel -c constraints.txt")
        make = f"make notebooks -o .venv/docs BIN={place.folder}/venv/bin PAGES={page}"
        place.run(make, MPLBACKEND="module://matplotlib_inline.backend_inline")


class served:  # used as a function
    """A server of the Tinker API, started in the environment; what is yielded leads clients there."""

    def __init__(self, place: Environment, command: str) -> None:
        self.place = place
        self.command = f"exec {command} --port 0"

    def __enter__(self) -> dict[str, str]:
        self.log = (self.place.folder / "server.log").open("w")
        self.process = subprocess.Popen(
            ["bash", "-c", self.command],
            cwd=self.place.work,
            env=self.place.variables | {"PYTHONUNBUFFERED": "1"},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        for _ in range(600):
            text = (self.place.folder / "server.log").read_text()
            if found := re.search(r"http://127\.0\.0\.1:\d+", text):
                return {"TINKER_BASE_URL": found[0], "TINKER_API_KEY": "tml-local"}
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        self.__exit__()
        raise AssertionError(f"rlkit serve did not say where it listens:\n{text}")

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


def extra(name: str, place: Environment, wheel: Path) -> None:
    """The wheel with one extra alone ("core": with none), and a program that uses what it promises."""
    wanted = "" if name == "core" else f"[{name}]"
    constraints = "" if name in UNPINNED else f" -c '{ROOT / 'constraints.txt'}'"
    if name not in UNPINNED:
        place.link_required(*([] if name == "core" else [name]))
    place.run(f"pip install '{wheel}{wanted}'{constraints}")
    place.run("pip check")
    variables = {"RLKIT_QUICKSTART": str(ROOT / "examples/quickstart.py")}
    variables["RLKIT_OPENREWARD_SERVER"] = str(ROOT / "tests/envs/openreward_server.py")
    with contextlib.ExitStack() as stack:
        if name == "tinker":  # by this Python's rlkit, since a server trains, which wants torch
            program = f"{shlex.quote(sys.executable)} -m rlkit.cli serve --backend toy"
            variables |= stack.enter_context(served(place, program))
        place.run(f"python -P '{PROGRAMS}' {name}", **variables)
    if name in TRACKERS:
        place.run(f"pip install pytest pytest-timeout {' '.join(TRACKERS[name])}{constraints}")
        shutil.copytree(ROOT / "tests/tracking", place.work / "tests")
        place.run(f"python -P -m pytest -q -p no:cacheprovider tests/test_services.py -k '{name}' -rs | tee said")
        if re.search(r"skipped|no tests ran", (place.work / "said").read_text()):
            raise AssertionError((place.work / "said").read_text())


# The slowest first, so that none is left over at the end.
CHECKS = dict.fromkeys(["readme", "mlflow", "examples", "notebooks", "local", "core", *EXTRAS])
CHECKS = {name: {"readme": readme, "notebooks": notebooks}.get(name) for name in CHECKS if name not in NOT_ALONE}
COVERED = {"torch"}  # by readme, which begins with it alone; run where it is named


def children_seconds() -> float:
    """Return the processor seconds of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def check(name: str, folder: Path, wheel: Path, keep: bool) -> str | None:
    """None, or what went wrong."""
    began, used, wrong = time.monotonic(), children_seconds(), None
    try:
        place = Environment(folder / name, whole=name == "readme")
        (CHECKS[name] or (lambda *args: extra(name, *args)))(place, wheel)
    except (AssertionError, subprocess.SubprocessError, OSError, StopIteration) as error:
        wrong = f"{type(error).__name__}: {error}"
    seconds = f"{time.monotonic() - began:6.0f} s{children_seconds() - used:6.0f} s of processors"
    print(f"{'FAILED' if wrong else 'ok':7}{name:16}{seconds}", flush=True)
    if not keep:
        shutil.rmtree(folder / name, ignore_errors=True)
    return wrong


def main() -> int:
    """1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of checks; none: all")
    parser.add_argument("--list", action="store_true", help="shows the names")
    parser.add_argument("--jobs", type=int, default=2, help="environments at the same time (default: 2)")
    parser.add_argument("--keep", type=Path, help="a folder for the environments, which are left there")
    options = parser.parse_args()
    if options.list:
        print(*CHECKS, sep="\n")
        return 0
    unknown = set(options.names) - CHECKS.keys()
    if unknown:
        parser.error(f"no check named {', '.join(sorted(unknown))}; there are: {', '.join(CHECKS)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlkit-install-") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        made = Path(temporary) / "wheel"
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(made), str(ROOT)]
        subprocess.run(build, check=True)
        (wheel,) = made.glob("*.whl")
        names = options.names or [name for name in CHECKS if name not in COVERED]
        with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:  # each counts its children's seconds
            found = pool.map(check, names, *map(itertools.repeat, (folder, wheel, options.keep is not None)))
            failures = {name: wrong for name, wrong in zip(names, found, strict=True) if wrong}
    for name, wrong in failures.items():
        print(f"\n== {name}\n{wrong}")
    seconds = f"{time.monotonic() - began:.0f} s, {children_seconds():.0f} s of processors"
    print(f"\n{len(names) - len(failures)} of {len(names)} in {seconds}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
