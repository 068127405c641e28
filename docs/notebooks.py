"""Writes examples/*.ipynb from pages of the documentation, so that there is one text of each: python docs/notebooks.py.

A page's python blocks become cells, what stands between them becomes text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
NOTEBOOKS = {"tutorial.md": "tutorial.ipynb", "swap.md": "swap_backends.ipynb"}
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```\n?", flags=re.MULTILINE | re.DOTALL)


def cells(page: str) -> list[dict[str, Any]]:
    """The page's cells in order; a block marked no-run is tagged so."""
    found: list[dict[str, Any]] = []

    def add(kind: str, text: str, tags: list[str]) -> None:
        text = text.strip("\n")
        if text:
            cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(found)}", "metadata": {}}
            cell |= {"execution_count": None, "outputs": []} if kind == "code" else {}
            cell["metadata"] |= {"tags": tags} if tags else {}
            found.append(cell | {"source": text.splitlines(keepends=True)})

    end = 0
    for match in FENCE.finditer(page):
        add("markdown", page[end : match.start()], [])
        add("code", match[2].replace("asyncio.run(main())", "await main()"), match[1].split())  # a loop runs there
        end = match.end()
    add("markdown", page[end:], [])
    return found


def notebook(page: str) -> str:
    """The whole file."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells(page), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for page, name in NOTEBOOKS.items():
        (EXAMPLES / name).write_text(notebook((DOCS / page).read_text("utf-8")), "utf-8")
