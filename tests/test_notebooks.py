"""The notebooks are the pages that they were made from, and run in a loop as a notebook's cells do."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def converter():
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOTEBOOKS = converter().NOTEBOOKS


@pytest.mark.parametrize(("page", "name"), NOTEBOOKS.items())
def test_one_text(page, name):
    """What is in examples/ is what docs/notebooks.py makes of the page now, with the cells' outputs."""
    whole = json.loads((ROOT / "examples" / name).read_text("utf-8"))
    outputs = [cell.pop("outputs") for cell in whole["cells"] if cell["cell_type"] == "code"]
    bare = converter().notebook((ROOT / "docs" / page).read_text("utf-8"))
    for cell in (*bare["cells"], *whole["cells"]):
        cell.pop("outputs", None)
        cell.pop("execution_count", None)
        cell["source"] = "".join(cell["source"])
    assert whole == bare
    shown = [output for each in outputs for output in each]
    assert len(shown) > 2
    assert "error" not in {output["output_type"] for output in shown}
    assert str(ROOT) not in json.dumps(shown), "a path of the machine that it was run on"


@pytest.mark.parametrize("name", NOTEBOOKS.values())
def test_cells_run(name, tmp_path, monkeypatch):
    """In order, in one namespace, inside of a running event loop."""
    pytest.importorskip("torch")
    pytest.importorskip("tinker", reason="needs the extra tinker")
    pytest.importorskip("matplotlib", reason="needs the extra examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads((ROOT / "examples" / name).read_text("utf-8"))["cells"]
    names = {"__name__": "__main__"}

    async def run():
        done = 0
        for cell in cells:
            if cell["cell_type"] == "code":
                code = compile("".join(cell["source"]), name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                result = eval(code, names)  # noqa: S307  # our own pages
                if inspect.isawaitable(result):
                    await result
                done += 1
        return done

    assert asyncio.run(run()) > 3
