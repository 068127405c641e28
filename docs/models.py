"""Writes the table of docs/models.md from the families that the tests hold: python docs/models.py (``--check``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families -->", "<!-- end -->"
PATHS = {
    "slots": "slots; tree",
    "cache": "the library's cache, in batches; rows",
    "request": "the library's cache, one request at a time; rows",
    "whole": "all tokens again for each new one, in batches; rows",
    "refused": "refused",
}


def rows() -> Iterator[str]:
    """The families of one path and one note in a row."""
    from tests.models.families import FAMILIES

    for path, text in PATHS.items():
        notes = dict.fromkeys(family.note for family in FAMILIES.values() if family.path == path)
        for note in sorted(notes):
            names = [name for name, family in FAMILIES.items() if (family.path, family.note) == (path, note)]
            yield f"| {text} | {'; '.join(names)} | {note} |"


def page(text: str) -> str:
    """``text`` with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(["| sampled in; trained as | families | |", "|---|---|---|", *rows()])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    written = PAGE.read_text("utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(page(written), "utf-8")
    elif page(written) != written:
        sys.exit("docs/models.md is not the table of tests/models/families.py; run: python docs/models.py")
