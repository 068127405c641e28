"""A headless Chromium to look at pages with."""

from __future__ import annotations

import shutil
import time

import pytest

PHONE, DESKTOP = (390, 844), (1400, 900)


def chromium():
    """A driver; tests are skipped where Chromium, its driver or selenium is not installed."""
    pytest.importorskip("selenium", reason="the page is tested in a browser: pip install selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("the page is tested in a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


class Page:
    """An open page."""

    def __init__(self, driver, path, *, tab="curves", size=DESKTOP, dark=False):
        self.driver = driver
        width, height = size
        device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        media = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.get("about:blank")
        driver.get_log("browser")
        driver.get_log("performance")
        driver.get(f"{path.as_uri()}#{tab}")
        self.until(lambda: self.js("return document.documentElement.dataset.ready"))
        assert self.js("return document.documentElement.dataset.ready") == "yes"

    def js(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def until(self, true):
        """Waits until it is true; a page that never gets there fails the test."""
        for _ in range(1200):
            if true():
                return
            time.sleep(0.05)
        raise AssertionError("the page did not get there")

    def count(self, selector):
        return self.js("return document.querySelectorAll(arguments[0]).length", selector)

    def text(self, selector):
        return self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def click(self, selector):
        self.js("document.querySelector(arguments[0]).click()", selector)

    def type(self, label, value):
        script = "const n = document.querySelector(`[aria-label='${arguments[0]}']`); n.value = arguments[1];"
        self.js(script + " for (const kind of ['input', 'change']) n.dispatchEvent(new Event(kind))", label, value)

    def complaints(self):
        """What the browser logged: errors, and what the page's policy stopped."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "DEBUG"]
