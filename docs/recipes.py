"""Writes the tables of docs/recipes.md from the code: python docs/recipes.py (``--check``: only compare)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import rlkit
from rlkit.recipes import algorithms
from rlkit.recipes.method import NAMES, differences, fixed_differences, resolve
from rlkit.recipes.settings import Algorithm, Settings
from rlkit.recipes.settings import table as table_of_keys

PAGE = Path(__file__).with_name("recipes.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "algorithms-table.json"
COLUMNS = {"toy": "toy", "local": "local", "fake": "FakeTinker", "real": "real server"}


def table(head: str, rows: Iterator[str]) -> str:
    """A table in markdown."""
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *rows])


def recipes() -> str:
    """The algorithms: their parts, and where they are from."""
    rows = {name: row for name, row in algorithms.registry.items() if row.source != "an example"}
    return table(
        "| name | estimator | loss | token weights | data of a task | source |", (recipe(*x) for x in rows.items())
    )


def recipe(name: str, row: algorithms.Recipe) -> str:
    """One row of it."""
    named = [x if isinstance(x, str) else getattr(x, "__name__", "") for x in (row.advantage, row.loss)]
    beside = {
        "demonstrations": "rows",
        "pairs": "pairs",
        "texts": "texts",
        "rollouts": str(row.repeat_times),
        "mixed": f"{row.repeat_times}, rows",
    }
    needs = "".join(f", {need}" for need in row.needs) + ("" if row.select == "all" else f", {row.select}")
    loss = f"`{named[1]}`" + "".join(f" {said(key, value)}" for key, value in row.loss_args.items())
    weights = "" if row.data == "pairs" else row.weights
    estimator = f"`{named[0]}`" if named[0] else ""
    return f"| `{name}` | {estimator} | {loss} | {weights} | {beside[row.data]}{needs} | {row.source} |"


def said(key: str, value: object) -> str:
    """A setting."""
    return key if value is True else f"{key} {value:g}"


def defaults() -> str:
    """What each algorithm of Trinity's has there where nothing is set, beside what it has here."""
    names: dict[tuple[str, str], list[str]] = {}
    for name in NAMES:
        given = Algorithm(algorithm_type=name)
        method = resolve(given)
        told = [f"`{key}` {theirs} / {shown(ours)}" for key, (ours, theirs) in differences(given, method).items()]
        names.setdefault(("; ".join(told) or "none", "; ".join(fixed_differences(given, method))), []).append(
            f"`{name}`"
        )
    rows = (f"| {', '.join(mine)} | {told} | {said} |" for (told, said), mine in names.items())
    return table("| name | setting: there / here | other differences |", rows)


def shown(value: object) -> str:
    """A default of ours."""
    return "off" if value is None else str(value)


def settings(*kinds: str) -> str:
    """Keys of these kinds with what they mean; those with one reason stand together."""
    found: dict[str, list[str]] = {}
    for key, kind, why in table_of_keys(Settings):
        if kind in kinds:
            found.setdefault(why, []).append(key)
    return table("| key | |", (f"| {', '.join(f'`{key}`' for key in names)} | {why} |" for why, names in found.items()))


def results() -> str:
    """What benchmarks/algorithms_table.py found."""
    cells = json.loads(RESULTS.read_text("utf-8"))
    names = [name for name in COLUMNS if any(cell["backend"] == name for cell in cells)]
    by = {(cell["algorithm"], cell["backend"]): cell for cell in cells}
    order = [name for name in algorithms.registry if (name, names[0]) in by]
    head = "| algorithm | objective | " + " | ".join(COLUMNS[name] for name in names) + " |"
    return table(head, (result([by.get((algorithm, name)) for name in names]) for algorithm in order))


def result(cells: list[dict | None]) -> str:
    """One algorithm's row."""
    shown = []
    for cell in cells:
        if cell is None or "reason" in cell:
            shown.append("" if cell is None else cell["reason"])
        else:
            shown.append(f"{cell['first']:.2f} → {cell['last']:.2f}" + ("" if cell["better"] else ", no better"))
    given = next(cell for cell in cells if cell is not None and "objective" in cell)
    objective = {"reward": "reward", "loss": "loss", "kl_teacher": "KL of the teacher"}[
        given["objective"].rpartition("/")[2]
    ]
    return f"| `{given['algorithm']}` | {objective} | " + " | ".join(shown) + " |"


def page(text: str) -> str:
    """The page with its tables made anew."""
    parts = {
        "algorithms": recipes(),
        "defaults": defaults(),
        "mapped": settings("mapped"),
        "own": settings("rlkit's own"),
        "refused": settings("refused"),
        "unfollowed": settings("not followed"),
        "unused": settings("without effect"),
        "results": results(),
    }
    for name, made in parts.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition("<!-- end -->")
        text = f"{before}<!-- {name} -->\n{made}\n<!-- end -->{after}"
    return text


if __name__ == "__main__":
    now = PAGE.read_text("utf-8")
    if "--check" in sys.argv[1:]:
        sys.exit(0 if page(now) == now else f"{PAGE.name} is out of date: python docs/recipes.py")
    PAGE.write_text(page(now), "utf-8")
    print(f"{PAGE.name}: the tables of rlkit {rlkit.__version__}")
