"""Writes the table of docs/models.md from the families that the tests hold: python docs/models.py (``--check``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families -->", "<!-- end -->"
LAYOUTS = {
    "packed": "packed",
    "padded": "padded",
    "equal": "one length",
    "uncached": "one length, all tokens again for each new one",
    "refused": "refused",
}


def rows() -> Iterator[str]:
    """The families of one layout and one note in a row."""
    from tests.models.families import FAMILIES

    for layout, text in LAYOUTS.items():
        notes = dict.fromkeys(family.note for family in FAMILIES.values() if family.layout == layout)
        for note in sorted(notes):
            names = [name for name, family in FAMILIES.items() if (family.layout, family.note) == (layout, note)]
            yield f"| {text} | {'; '.join(names)} | {note} |"


def page(text: str) -> str:
    """``text`` with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(["| layout | families | |", "|---|---|---|", *rows()])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    written = PAGE.read_text("utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(page(written), "utf-8")
    elif page(written) != written:
        sys.exit("docs/models.md is not the table of tests/models/families.py; run: python docs/models.py")
