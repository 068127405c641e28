"""The page in a browser."""

from __future__ import annotations

import json

import pytest

from rlkit.report import write
from tests.report import browser, build
from tests.report.browser import DESKTOP, PHONE, Page
from tests.report.test_page import hostile


@pytest.fixture(scope="module")
def driver():
    driver = browser.chromium()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(build.run(tmp_path_factory.mktemp("run"), steps=4, tasks=2, n=3))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write(build.many(tmp_path_factory.mktemp("large"), 100, n=8, length=40))


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_every_part_shows_without_a_complaint(driver, path, size, dark):
    """On a desktop and a phone, light and dark: nothing wider than the screen, nothing in the browser's log."""
    page = Page(driver, path, size=size, dark=dark)
    for tab in ("curves", "trajectories", "counters", "settings"):
        page.click(f"#tab-{tab}")
        assert page.js("return document.documentElement.scrollWidth <= innerWidth")
        assert len(page.text(f"#{tab}")) > 50
    light = sum(int(x) for x in page.js("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"))
    assert (light < 200) == dark
    assert page.complaints() == []


def test_durations_are_rounded_once(driver, path):
    """Never 60 seconds or 60 minutes."""
    page = Page(driver, path)
    times = [0.2, 59.4, 59.6, 599.7, 3599.4, 3599.7, 7185]
    shown = ["under a second", "59 s", "1 min 0 s", "10 min 0 s", "59 min 59 s", "1 h 0 min", "2 h 0 min"]
    assert page.js("return arguments[0].map((time) => duration(time))", times) == shown


def test_curves_are_drawn(driver, path):
    page = Page(driver, path)
    page.until(lambda: page.count("#standard canvas") >= 3)
    painted = """const c = document.querySelector('#standard canvas');
        return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((x) => x).length"""
    assert page.js(painted) > 2000
    page.complaints()  # of the browser, about reading a canvas
    assert "more-sums" in page.text("#standard .u-legend")
    page.js("document.getElementById('others').open = true; document.getElementById('others').scrollIntoView()")
    page.until(lambda: page.count("#others-grid canvas") > 0)
    page.js("const s = document.getElementById('smoothing'); s.value = 0.9; s.dispatchEvent(new Event('input'))")
    page.until(lambda: page.text("#smoothed") == "0.90")  # of flat curves too, which rounding makes uneven
    page.click("#theme")
    page.click("#theme")
    assert page.js("return document.documentElement.dataset.theme") == "dark"
    assert page.complaints() == []


def test_what_stays_the_same_is_folded_and_named(driver, path):
    """Charts of one number at every step stand below, under a line that names them with it; evaluations are not."""
    page = Page(driver, path)
    named = page.text("#level-names")
    assert "failed 0 %" in named
    assert page.count("#level-grid article") == named.count(" · ") + 1
    titles = page.js("return [...document.querySelectorAll('#standard h3')].map((x) => x.firstChild.textContent)")
    assert "Reward" in titles
    assert not {"Failed"} & set(titles)


def test_ticks_of_an_axis_differ(driver, path):
    """Of a constant, and of what varies in the fifth digit or in the thousands."""
    page = Page(driver, path)
    ticks = "return arguments[0].map((curve) => ticked(curve, number))"
    curves = [[1, 1.00001, 1.00002], [0.9, 0.95, 1, 1.05], [1000, 1000.5, 1001], [2e-9, 2.0001e-9]]
    assert page.js(ticks, curves) == [
        ["1", "1.00001", "1.00002"],
        ["0.9", "0.95", "1", "1.05"],
        ["1,000", "1000.5", "1,001"],
        ["2.0000e-9", "2.0001e-9"],
    ]
    assert page.js("return span(1, 1.0000001, false)") == pytest.approx([0.9, 1.1])


def test_cut_answers_are_seen(driver, tmp_path):
    """Where max_tokens cut what was said: in the headline, a chart, the row and the episode, with the right answer."""
    page = Page(driver, write(build.cut(tmp_path)))
    assert "cut at max_tokens\n75 %" in page.text("#tiles")
    assert "truncated" not in page.text("#tiles")
    assert "cut at max_tokens 75 %" in page.text("#level-names")
    page.click("#tab-trajectories")
    rows = page.js("return [...document.querySelectorAll('.row')].map((row) => row.innerText)")
    assert rows[0].startswith("step 2"), "the last step first"
    assert sum("terminated, cut" in row for row in rows) == 9
    assert all(row.splitlines()[-3].endswith("3 + 4 =") for row in rows)
    page.until(lambda: "right answer" in page.text(".facts"))
    facts = page.text(".facts").split("\n")
    assert facts[facts.index("right answer") + 1] == "7"
    assert page.js("return location.hash") == "#trajectories"
    assert "Step 2" in page.text(".facts")
    assert page.complaints() == []


def test_evaluations_have_intervals(driver, tmp_path):
    """Lines from low to high are drawn at each evaluation, and there is room for them."""
    page = Page(driver, write(build.cut(tmp_path)))
    page.until(lambda: page.count("#standard canvas") > 0)
    scale = "return aligned && wider(0.5, 0.5, [{x: [0], low: [0.2], high: [0.9]}])"
    assert page.js(scale) == [0.2, 0.9]
    panels = page.js("return unpack('about').then((about) => about.panels)")
    (curve,) = [curve for panel in panels if panel["title"] == "Evaluation" for curve in panel["curves"]]
    assert (curve["low"], curve["y"], curve["high"]) == ([0.1, 0.6], [0.2, 0.7], [0.3, 0.8])
    assert page.complaints() == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_scores_of_harnesses_are_a_table(driver, tmp_path, size):
    """With standard errors, the last step first; a curve has an interval at each checkpoint."""
    page = Page(driver, write(build.judged(tmp_path)), size=size)
    page.until(lambda: page.count("#standard canvas") > 0)
    rows = [row.split(None, 1) for row in page.text(".benchmarks tbody").split("\n")]
    assert [step for step, _ in rows] == ["3", "3", "1", "1"]
    assert " ".join(rows[0][1].split()) == "lm-eval 0.4.13 arc acc 0.5 ± 0.05 100"
    assert "<b>gsm</b>" in rows[1][1]
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints() == []


def test_what_it_ran_on_is_under_settings(driver, tmp_path):
    page = Page(driver, write(build.cut(tmp_path)), tab="settings")
    shown = page.text("#settings")
    for name in ("command", "processor", "python", "versions.numpy", "starts"):
        assert name in shown


def test_a_trajectory_shows_what_was_said_and_its_numbers(driver, path):
    page = Page(driver, path, tab="trajectories/1")
    page.until(lambda: page.count(".turn.policy .t") > 20)
    assert "What is " in page.text(".turns")
    said = page.js("return [...document.querySelectorAll('.turn.policy .said')].map((x) => x.textContent).join('')")
    assert "✓ é" in said  # characters of several tokens
    assert "<|im_end|>" in said
    assert page.count(".turn.policy .t[class*=q]") > 0
    page.js("document.querySelector('.turn.policy .t').dispatchEvent(new Event('pointerenter'))")
    assert "logprob" in page.text(".token")
    assert "trainer" in page.text(".token")
    buttons = page.js("return [...document.querySelectorAll('.segments button')].map((b) => b.textContent)")
    assert buttons == ["none", "logprob", "advantage", "trainer \u2212 sampler"]
    for i, kinds in ((2, "pn"), (3, "pn"), (0, "")):
        page.js("document.querySelectorAll('.segments button')[arguments[0]].click()", i)
        shades = page.js("return [...document.querySelectorAll('.turn.policy .t')].map((t) => t.classList[1] || '')")
        assert {shade[:1] for shade in shades} - {"", "s"} <= set(kinds)
    page.click(".exact input")
    assert "<|im_start|>assistant" in page.text(".turn.context")
    assert page.count(".members .chip") == 3
    page.js("document.querySelectorAll('.members .chip')[2].click()")
    page.until(lambda: page.js("return location.hash") == "#trajectories/2")
    assert page.complaints() == []


def test_tool_calls_and_their_results_are_shown(driver, path):
    page = Page(driver, path, tab="trajectories")
    page.type("Order", "turns")  # those with a call have more than one
    page.click(".row")
    page.until(lambda: page.count(".turn.tool") > 0 and page.count(".turn.policy .call") > 0)
    assert page.text(".turn.policy .call").startswith("add")
    assert '"x"' in page.text(".turn.policy .call")


def test_filters_and_orders(driver, path):
    page = Page(driver, path, tab="trajectories")
    index = page.js("return unpack('about').then((about) => about.index)")

    def rows():
        return int(page.text(".under .count").split()[0])

    assert rows() == 24
    page.type("reward ≥", "0.5")
    page.until(lambda: rows() == sum(reward >= 0.5 for reward in index["reward"]))
    page.click(".under .plain")
    page.until(lambda: rows() == 24)
    page.type("Environment", "1")
    page.until(lambda: rows() == 12)
    page.type("step ≥", "2")
    page.until(lambda: rows() == 6)
    page.click(".under .plain")
    page.type("Order", "long")
    page.until(lambda: f"{max(index['tokens'])} tokens" in page.text(".row .three"))
    page.type("Search what was said", "no such words anywhere")
    page.until(lambda: rows() == 0)
    assert page.count(".row") == 0


def test_search_finds_what_was_said_in_every_part(driver, large):
    page = Page(driver, large, tab="trajectories")
    parts = page.count("script[type='text/plain']") - 1
    assert parts > 1
    said = page.js(
        """return (async () => { let n = 0;
        for (let i = 0; i < arguments[0]; i++) for (const r of await unpack(`part-${i}`))
          n += r.messages.some((m) => m.content.includes('seven seven'));
        return n; })()""",
        parts,
    )
    assert 0 < said < 800
    page.type("Search what was said", "SEVEN seven")
    page.until(lambda: page.text(".under .count").startswith(f"{said} of 800 trajectories"))


def test_only_rows_in_view_exist(driver, large):
    page = Page(driver, large, tab="trajectories")
    assert page.text(".under .count") == "800 trajectories"
    assert 5 < page.count(".row") < 40
    page.js("const l = document.querySelector('.list'); l.scrollTop = l.scrollHeight")
    page.until(lambda: "step 0" in page.text(".row:last-child"))
    assert page.count(".row") < 40
    steps = page.js("return unpack('about').then((about) => about.index.step)")
    order = sorted(range(800), key=lambda i: (-steps[i], i))  # the last step first
    page.click(".row:last-child")
    page.until(lambda: page.js("return location.hash") == f"#trajectories/{order[-1]}")
    page.js("document.querySelector('.list').dispatchEvent(new KeyboardEvent('keydown', {key: 'k'}))")
    page.until(lambda: page.js("return location.hash") == f"#trajectories/{order[-2]}")


def test_on_a_phone_the_list_and_the_trajectory_take_turns(driver, path):
    page = Page(driver, path, tab="trajectories", size=PHONE)
    shown = "return [document.querySelector('.left'), document.querySelector('.detail')].map((x) => x.offsetWidth > 0)"
    assert page.js(shown) == [True, False]
    page.click(".row")
    page.until(lambda: page.js(shown) == [False, True])
    page.until(lambda: page.count(".back") == 1)
    page.click(".back")
    assert page.js(shown) == [True, False]


def open_hostile(driver, path, tab):
    page = Page(driver, path, tab=tab)
    if tab.startswith("trajectories"):
        page.until(lambda: page.count(".turn.policy .t") > 20)
        page.type("Search what was said", "</script><script>")
        page.until(lambda: page.text(".under .count").startswith("3 "))
        page.click(".exact input")
    return page


def test_hostile_text_does_not_run(driver, tmp_path):
    """Markup in every text of a run is shown as text on every part of the page, and runs nothing."""
    path = write(hostile(tmp_path))
    for tab in ("curves", "trajectories/0", "counters", "settings"):
        page = open_hostile(driver, path, tab)
        page.js("document.getElementById('others').open = true")
        assert page.js("return document.title").endswith("rlkit")
        assert page.count("img, iframe, object, embed, link, svg, base, form") == 0
        assert page.count("script:not([type])") == 1
        shown = page.js("return document.body.innerText.toWellFormed()")
        assert "<script>document.title='taken'" in shown.replace("\n", "")
        assert page.complaints() == []


def test_a_script_that_got_in_would_not_run(driver, path):
    """The second line: even markup put into the page by force runs nothing and loads nothing."""
    page = Page(driver, path)
    page.js(
        """document.body.insertAdjacentHTML('beforeend', `<img src="x.png" onerror="document.title='taken'">
        <iframe srcdoc="<script>parent.document.title='taken'</script>"></iframe>`);
        const s = document.createElement('script');
        s.textContent = "document.title='taken'";
        document.body.append(s);"""
    )
    page.until(lambda: len(page.complaints()) > 0)
    assert "taken" not in page.js("return document.title")


def test_no_request_leaves_the_page(driver, path):
    """The browser's own record of the network: the file itself and nothing else."""
    for tab in ("curves", "trajectories/3", "settings"):
        Page(driver, path, tab=tab)
        messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        assert len(asked) >= 1
        assert {url.partition("#")[0] for url in asked} <= {path.as_uri(), "about:blank"}
