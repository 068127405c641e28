"""The pages of the documentation are programs: their python blocks run in order, on the toy backend."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="losses need torch: pip install 'rlkit-lm[torch]'")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def blocks(path):
    """(what stands behind the word python, the block) with as many empty lines before it as in the page."""
    text = path.read_text("utf-8")
    for match in FENCE.finditer(text):
        yield match[1].strip(), "\n" * text.count("\n", 0, match.start(2)) + match[2]


@pytest.fixture(autouse=True)
def _registries_as_they_were():
    """What a page registers is gone after it."""
    import rlkit
    from rlkit import losses

    kept = [(registry, dict(registry)) for registry in (rlkit.advantages.registry, losses.registry)]
    yield
    for registry, names in kept:
        for name in registry.keys() - names.keys():
            del registry[name]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_runs(path, tmp_path, monkeypatch):
    """Each block sees what the blocks before it made; what is marked no-run needs a real model."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": path.stem}
    for mark, block in blocks(path):
        assert mark in ("", "no-run"), f"{path.name}: unknown mark {mark!r}"
        code = compile(block, str(path), "exec")
        if not mark:
            exec(code, names)  # noqa: S102  # our own pages


def test_the_loop_of_the_readme_learns(tmp_path, monkeypatch):
    """What the README shows is not only valid: the mean reward rises from about 0.2 to nearly 1."""
    monkeypatch.chdir(tmp_path)
    names = {}
    ((_, block),) = blocks(ROOT / "README.md")
    exec(compile(block, "README.md", "exec"), names)  # noqa: S102
    assert names["means"][0] < 0.4
    assert names["means"][-1] > 0.9


def test_the_readme_names_what_is_registered():
    """Its table of losses and estimators is the registries' own."""
    import rlkit
    from rlkit import losses

    text = (ROOT / "README.md").read_text("utf-8")
    rows = {
        row[1].strip(): set(re.findall(r"`(\w+)`", row[2]))
        for row in re.finditer(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    }
    assert rows["losses"] <= losses.registry.keys()
    assert rows["advantages"] <= set(rlkit.advantages.__all__)
    assert rows["backends"] == {"toy", "local", "tinker"}
