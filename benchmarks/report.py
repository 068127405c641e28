"""How long a run page of 10,000 trajectories takes to write and to open in headless Chromium.

python benchmarks/report.py [--groups 1250] prints a table and writes benchmarks/results/report.json. It needs selenium,
Chromium and its driver. Opening is from the navigation to the trajectories' list and the first trajectory being shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlkit import report
from tests.report import browser, build

OUT = Path(__file__).parent / "results" / "report.json"


def opened(driver, path):
    """Milliseconds until the page is ready, and until a search through all of it is done."""
    page = browser.Page(driver, path, tab="trajectories/0")
    page.until(lambda: page.count(".turn.policy .t") > 0)
    script = "const e = performance.getEntriesByName('shown')[0]; return e ? e.startTime : null"
    page.until(lambda: page.js(script) is not None)
    shown = page.js(script)
    began = time.perf_counter()
    page.type("Search what was said", "seven seven")
    page.until(lambda: "of" in page.text(".under .count") and "searched" not in page.text(".under .count"))
    return shown, 1000 * (time.perf_counter() - began), page.text(".under .count")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1250, help="of eight trajectories each")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build.many(Path(folder), args.groups, length=200)
        began = time.perf_counter()
        path = report.write(folder)
        written = time.perf_counter() - began
        driver = browser.chromium()
        try:
            found = [opened(driver, path) for _ in range(args.repeats)]
        finally:
            driver.quit()
        result = {
            "trajectories": 8 * args.groups,
            "lines_mb": round((Path(folder) / "trajectories.jsonl").stat().st_size / 1e6, 1),
            "page_mb": round(path.stat().st_size / 1e6, 1),
            "write_s": round(written, 2),
            "open_ms": [round(shown) for shown, _, _ in found],
            "search_all_ms": [round(search) for _, search, _ in found],
            "found": found[0][2],
        }
    for name, value in result.items():
        print(f"{name:>14}  {value}")
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
