"""The page in a headless Chromium."""

from __future__ import annotations

import shutil
import time

import pytest

from rlkit.report import write
from tests.report import build
from tests.report.test_page import POISON, poisoned


def open_browser():
    """Return a driver; skip where Chromium, its driver or selenium is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs: pip install selenium")
    binary, driver = (next(filter(None, map(shutil.which, names)), None) for names in (BROWSERS, ["chromedriver"]))
    if binary is None or driver is None:
        pytest.skip("needs: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


BROWSERS = ["chromium", "chromium-browser", "google-chrome"]


class Page:
    """An open page."""

    def __init__(self, driver, path, tab="curves", *, width=1400, dark=False):
        self.driver = driver
        device = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
        media = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [media]})
        driver.get("about:blank")
        driver.get_log("browser")
        driver.get(f"{path.as_uri()}#/{tab}")
        self.until("document.documentElement.dataset.ready === 'yes'")

    def js(self, expression):
        return self.driver.execute_script(f"return {expression}")

    def until(self, expression):
        end = time.monotonic() + 60
        while not self.js(expression):
            assert time.monotonic() < end, f"never: {expression}"
            time.sleep(0.02)

    def fill(self, selector, value):
        self.js(f"void (document.querySelector('{selector}').value = {value!r})")
        self.js(f"document.querySelector('{selector}').dispatchEvent(new Event('input', {{bubbles: true}}))")

    def text(self, selector):
        return self.js(f"document.querySelector('{selector}').innerText")

    def complaints(self):
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "DEBUG"]


@pytest.fixture(scope="module")
def driver():
    driver = open_browser()
    yield driver
    driver.quit()


def test_curves_and_trajectories(driver, tmp_path):
    """Charts are drawn; one searches, orders and filters, opens a trajectory and its group, and changes colours."""
    path = write(build.run(tmp_path, 300), tokenizer=build.TOKENIZER)
    page = Page(driver, path)
    page.until("document.querySelectorAll('canvas').length > 3")
    page.fill("#find-metric", "my/own")
    page.until("document.querySelectorAll('[data-chart]:not([hidden]) canvas').length === 1")

    page = Page(driver, path, "trajectories")
    assert page.text("#count") == "1,200 trajectories"
    assert page.js("document.querySelectorAll('.row').length") < 30  # only those in view
    page.fill("#order", "worst")
    assert page.text(".row .chip") == "0"
    page.fill("[data-column=reward]", "0.5")
    assert page.text(".row .chip") == "1"
    right = int(page.text("#count").split()[0])
    page.fill("#search", "TOOL")
    page.until("!document.querySelector('#count').innerText.includes('searching')")
    assert 0 < int(page.text("#count").split()[0]) < right < 1200
    page.js("document.querySelector('.row').click()")
    page.until("document.querySelector('.call') !== null")
    assert page.text(".call").startswith('add {"x":')
    assert "right answer" in page.text("#opened dl")
    assert page.js("[...document.querySelectorAll('.tokens')].at(-1).textContent").endswith("✓ é 🙂<|im_end|>")
    for mode, kinds in (("logprob", "q"), ("advantage", "pn"), ("gap", "pn"), ("none", "")):
        page.fill("#mode", mode)
        found = page.js("[...document.querySelectorAll('.tokens span')].map((span) => span.className[0] ?? '')")
        assert set(found) - {""} <= set(kinds)
        assert any(found) == bool(kinds)
    page.js("document.querySelector('#sent').click()")
    assert page.text(".card.context").strip().endswith("?\nassistant")
    page.js("document.querySelectorAll('#opened .chip')[3].click()")
    page.until("[...document.querySelectorAll('#opened .chip')].at(3).getAttribute('aria-pressed') === 'true'")
    page.js("document.querySelector('#filters button').click()")
    page.until("document.querySelector('#count').innerText === '1,200 trajectories'")
    assert page.complaints() == []


def test_poison_is_shown_and_does_not_run(driver, tmp_path):
    """On every part, in light and dark, on a wide and a narrow screen, without a word in the browser's log."""
    path = write(poisoned(tmp_path))
    for width, dark in ((1400, False), (390, True)):
        for tab in ("curves", "trajectories/0", "settings"):
            page = Page(driver, path, tab, width=width, dark=dark)
            page.until("document.body.innerText.includes('<script>')")
            assert page.js("document.title") == f"{tmp_path.name} · rlkit"
            assert page.js("document.querySelectorAll('img, script:not([type])').length") == 1
            assert page.js("document.documentElement.scrollWidth <= innerWidth"), (tab, width)
            assert page.complaints() == []
        shades = page.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)")
        assert (sum(map(int, shades)) < 200) == dark
    page = Page(driver, path, "trajectories")
    page.fill("#search", POISON[:20])
    page.until("document.querySelector('#count').innerText === '3 trajectories'")
