"""How long the page of a large run takes to write, to open in headless Chromium, to order and to search.

python benchmarks/report.py [--groups 20000] prints a table and writes benchmarks/results/report.json. It needs
selenium, Chromium and its driver. Opening ends when the list and the first trajectory are shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlkit import report
from tests.report import build
from tests.report.test_browser import Page, open_browser

OUT = Path(__file__).parent / "results" / "report.json"


def measure(driver, path):
    """Return the seconds until the page is open, until it is ordered, and until all of it has been searched."""
    times = [time.perf_counter()]
    page = Page(driver, path, "trajectories")
    page.until("document.querySelector('.tokens span') !== null")
    times.append(time.perf_counter())
    page.fill("#order", "worst")
    times.append(time.perf_counter())
    page.fill("#search", "with the tool")
    page.until("!document.querySelector('#count').innerText.includes('searching')")
    times.append(time.perf_counter())
    print(page.text("#count"))
    return [round(end - begin, 2) for begin, end in itertools.pairwise(times)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=20_000, help="of four trajectories each")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build.run(Path(folder), args.groups, per_step=50)
        began = time.perf_counter()
        path = report.write(folder, tokenizer=build.TOKENIZER)
        written = time.perf_counter() - began
        driver = open_browser()
        try:
            times = [measure(driver, path) for _ in range(args.repeats)]
        finally:
            driver.quit()
        result = {
            "groups": args.groups,
            "lines_mb": round((Path(folder) / "trajectories.jsonl").stat().st_size / 1e6, 1),
            "page_mb": round(path.stat().st_size / 1e6, 1),
            "write_s": round(written, 1),
            **dict(zip(("open_s", "order_s", "search_s"), zip(*times, strict=True), strict=True)),
        }
    for name, value in result.items():
        print(f"{name:>10}  {value}")
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
