"""Writes the tables of docs/recipes.md from the code: python docs/recipes.py (``--check``: only compare)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import rlkit
from rlkit.recipes import algorithms

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
    extra = {
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
    return f"| `{name}` | {estimator} | {loss} | {weights} | {extra[row.data]}{needs} | {row.source} |"


def said(key: str, value: object) -> str:
    """A setting."""
    return key if value is True else f"{key} {value:g}"


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
