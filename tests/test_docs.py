"""The pages of the documentation are programs: their python blocks run in order, on the toy backend."""

from __future__ import annotations

import json
import pkgutil
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
    _, (_, block) = blocks(ROOT / "README.md")
    exec(compile(block, "README.md", "exec"), names)  # noqa: S102
    assert names["means"][0] < 0.4
    assert names["means"][-1] > 0.9


def test_the_readmes_real_model_trains(tmp_path, monkeypatch, tiny):
    """Its first program, on a small random model and for two steps; again, it has nothing left to do."""
    from rlkit.tracking import read_metrics

    (mark, block), _ = blocks(ROOT / "README.md")
    assert mark == "no-run"
    for old, new in {'"smollm2-135m-instruct"': repr(tiny("llama")), "run.steps(10)": "run.steps(2)"}.items():
        assert block.count(old) == 1
        block = block.replace(old, new)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(compile(block, "README.md", "exec"), {})  # noqa: S102
        assert [row["step"] for row in read_metrics("runs/sums") if "rollout/cut" in row["metrics"]] == [0, 1]


def test_the_readmes_questions():
    """Sums and differences of two digits with their right answers, none of which an echo of the question holds."""
    path = re.search(r'Path\("(.*?)"\)', (ROOT / "README.md").read_text("utf-8"))[1]
    rows = [json.loads(line) for line in (ROOT / path).read_text("utf-8").splitlines()]
    right = {
        f"{a} {sign} {b}": a + b if sign == "+" else a - b for a in range(1, 10) for b in range(1, 10) for sign in "+-"
    }
    right = {terms: str(value) for terms, value in right.items() if value > 0 and str(value) not in terms.split()}
    assert sorted((row["prompt"], row["answer"]) for row in rows) == sorted(
        (f"What is {terms}?", answer) for terms, answer in right.items()
    )


def test_the_overview_names_what_is_registered():
    """Its table of losses and estimators is the registries' own."""
    import rlkit
    from rlkit import losses

    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    rows = {
        row[1].strip(): set(re.findall(r"`(\w+)`", row[2]))
        for row in re.finditer(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    }
    assert rows["losses"] <= losses.registry.keys()
    assert rows["advantages"] <= set(rlkit.advantages.__all__)
    assert rows["backends"] == {"toy", "local", "tinker"}


def test_the_reference_has_every_public_module():
    """Of the top level; ``make docs`` fails for a name that does not exist."""
    import rlkit

    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text("utf-8"), re.MULTILINE)
    public = {f"rlkit.{each.name}" for each in pkgutil.iter_modules(rlkit.__path__) if not each.name.startswith("_")}
    assert len(named) == len(set(named))
    assert {name for name in named if name.count(".") == 1} == public


def test_the_table_of_options_is_the_docstrings():
    """docs/backends.md: each option of the local backend, its default and its description."""
    import attrs

    from rlkit.backends.options import LocalOptions, describe

    page = (ROOT / "docs" / "backends.md").read_text("utf-8").partition("<!-- options")[2].partition("<!-- end")[0]
    rows = [re.sub(r"\[(`\w+`)\]\(#[\w-]+\)", r"\1", line) for line in page.splitlines()[3:]]
    fields = attrs.fields_dict(LocalOptions)
    right = {name: text.replace("``", "`") for name, text in describe(LocalOptions).items()}
    assert rows == [f"| `{name}` | `{fields[name].default!r}` | {text} |" for name, text in right.items()]


def test_every_registered_function_has_a_source():
    """Every estimator and loss of rlkit says in one line what it is, and where it comes from."""
    import rlkit

    exempt = {"cross_entropy", "running_baseline", "running_normalization"}
    checked = 0
    for registry in (rlkit.advantages.registry, rlkit.losses.registry, rlkit.losses.kl.registry):
        for name, summary in registry.table():
            if registry[name].__module__.startswith("rlkit.") and name not in exempt:
                assert summary.endswith("."), name
                assert "Source" in registry[name].__doc__, name
                checked += 1
    assert checked > 70
