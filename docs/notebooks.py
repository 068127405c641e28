"""Writes examples/*.ipynb from pages of the documentation, so that there is one text of each: python docs/notebooks.py.

A page's python blocks become cells, what stands between them and blocks marked no-run become text. The cells are run,
which needs the extra ``docs``, and their outputs are kept.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
NOTEBOOKS = {"tutorial.md": "tutorial.ipynb", "swap.md": "swap_backends.ipynb"}
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```\n?", flags=re.MULTILINE | re.DOTALL)


def cells(page: str) -> list[dict[str, Any]]:
    """The page's cells in order, not run."""
    found: list[dict[str, Any]] = []

    def add(kind: str, text: str) -> None:
        text = text.strip("\n")
        if text:
            cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(found)}", "metadata": {}}
            cell |= {"execution_count": None, "outputs": []} if kind == "code" else {}
            found.append(cell | {"source": text.splitlines(keepends=True)})

    end = 0
    page = page.replace("```python no-run", "```py")  # shown, and no cell
    for match in FENCE.finditer(page):
        add("markdown", page[end : match.start()])
        add("code", match[2].replace("asyncio.run(main())", "await main()"))  # a loop runs there
        end = match.end()
    add("markdown", page[end:])
    return found


def notebook(page: str) -> dict[str, Any]:
    """The whole file, not run."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells(page), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def executed(whole: dict[str, Any]) -> dict[str, Any]:
    """The file with what its cells print and show."""
    import nbformat
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:  # what the cells save
        resources = {"metadata": {"path": folder}}
        run = NotebookClient(
            nbformat.reads(json.dumps(whole), as_version=4), timeout=600, resources=resources
        ).execute()
    found: dict[str, Any] = json.loads(nbformat.writes(run, version=nbformat.NO_CONVERT))
    for cell in found["cells"]:
        cell["metadata"] = {}  # when it ran
    found["metadata"] = whole["metadata"]
    return found


if __name__ == "__main__":
    for page, name in NOTEBOOKS.items():
        made = executed(notebook((DOCS / page).read_text("utf-8")))
        (EXAMPLES / name).write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", "utf-8")
