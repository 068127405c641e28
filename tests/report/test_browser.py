"""The page in a headless Chromium."""

from __future__ import annotations

import shutil
import time

import pytest

from rlkit.report import write
from tests.report import build
from tests.report.test_page import poisoned


def open_browser():
    """Return a driver; skip where Chromium, its driver or selenium is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs: pip install selenium")
    binary, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


class Page:
    def __init__(self, driver, path, tab="curves", *, width=1400, theme="light"):
        self.driver = driver
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        driver.get("about:blank")
        driver.get_log("browser")
        driver.get(f"{path.as_uri()}#/{tab}")
        self.until("document.documentElement.dataset.ready === 'yes'")

    def js(self, expression):
        return self.driver.execute_script(
            f"const all = (each) => [...document.querySelectorAll(each)]; return {expression}"
        )

    def until(self, expression):
        end = time.monotonic() + 60
        while not self.js(expression):
            assert time.monotonic() < end, f"never: {expression}"
            time.sleep(0.02)

    def fill(self, selector, value):
        self.js(f"all('{selector}')[0].value = {value!r}")
        kinds = ("change",) if self.js(f"all('{selector}')[0].tagName") == "SELECT" else ("input", "change")
        for kind in kinds:  # drivers of browsers send no more for a choice
            self.js(f"all('{selector}')[0].dispatchEvent(new Event('{kind}', {{bubbles: true}}))")

    def text(self, selector):
        return self.js(f"all('{selector}')[0].innerText")


@pytest.fixture(scope="module")
def driver():
    driver = open_browser()
    yield driver
    driver.quit()


def test_curves_and_trajectories(driver, tmp_path):
    path = write(build.run(tmp_path, 300), tokenizer=build.TOKENIZER)
    page = Page(driver, path)
    page.fill("#find-metric", "my/own")
    page.until("all('[data-chart]:not([hidden]) canvas').length === 1")
    page = Page(driver, path, "trajectories")
    assert page.text("#count") == "1,200 trajectories"
    assert page.js("all('.row').length") < 30  # only those in view
    page.fill("#order", "worst")
    assert page.text(".row .chip") == "0"
    page.fill("[data-column=reward]", "0.5")
    assert page.text(".row .chip") == "1"
    right = int(page.text("#count").split()[0])
    page.fill("#search", "TOOL")
    page.until("!all('#count')[0].innerText.includes('searching')")
    assert 0 < int(page.text("#count").split()[0]) < right < 1200
    page.js("all('.row')[0].click()")
    page.until("all('.call').length")
    assert page.text(".call").startswith('add {"x":')
    assert "right answer" in page.text("#opened dl")
    assert page.js("all('.tokens').at(-1).textContent").endswith("✓ é 🙂<|im_end|>")
    for mode, kinds in (("logprob", "q"), ("advantage", "pn"), ("gap", "pn"), ("none", "")):
        page.fill("#mode", mode)
        found = page.js("all('.tokens span').map((span) => span.className[0] ?? '')")
        assert set(found) - {""} <= set(kinds)
        assert any(found) == bool(kinds)
    page.js("all('#sent')[0].click()")
    assert page.text(".card.context").strip().endswith("?")
    page.js("all('#opened .chip')[3].click()")
    page.until("all('#opened .chip')[3].getAttribute('aria-pressed') === 'true'")
    page.js("all('#filters button')[0].click()")
    page.until("all('#count')[0].innerText === '1,200 trajectories'")
    assert driver.get_log("browser") == []


def test_poison_is_shown_and_does_not_run(driver, tmp_path):
    path = write(poisoned(tmp_path))
    for width, theme in ((1400, "light"), (390, "dark")):
        for tab in ("curves", "trajectories/0", "settings"):
            page = Page(driver, path, tab, width=width, theme=theme)
            page.until("document.body.innerText.includes('<script>')")
            assert page.js("[document.title, all('img, script:not([type])').length]") == [f"{tmp_path.name} · rlkit", 1]
            assert page.js("document.documentElement.scrollWidth <= innerWidth"), (tab, width)
            assert driver.get_log("browser") == []
        shade = page.js("getComputedStyle(document.body).backgroundColor")
        assert shade == {"light": "rgb(246, 247, 249)", "dark": "rgb(16, 20, 27)"}[theme]
