"""Let an open page take many steps of a run, and print as JSON how much it keeps and draws. Runs in .venv-page.

Usage: redraw.py URL STEPS...: after each of these numbers of steps it counts.
"""

# pyright: basic, reportMissingImports=false
# playwright is installed in .venv-page alone

import json
import shutil
import sys
from typing import Final

from browse import ALONE, WAIT_MS
from playwright.sync_api import expect, sync_playwright

AT_ONCE: Final = 250  # steps of one message
TAKE: Final = """([first, last]) => {
  const steps = [...Array(last - first).keys()].map((index) => first + index);
  take(JSON.stringify({
    ...state,
    whole: false,
    rows: steps.map((step) => ({ step, "rollout/raw_reward": Math.sin(step), "train/loss": 1 / step })),
    times: {
      ...state.times,
      steps: steps.map((step) => ({ what: "step", step, begin: step, parts: { train: step / 1000 }, worst: {} })),
    },
  }));
}"""
COUNT: Final = """() => ({
  steps: rows.size,
  times: times.size,
  newest: Math.max(...rows.keys()),
  points: [...charts.values()].map(({ chart }) => chart.data[0].length),
  sparks: [...document.querySelectorAll("#health polyline")].map((one) => one.getAttribute("points").split(" ").length),
  elements: document.querySelectorAll("*").length,
})"""


def main() -> None:
    url, *counts = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(ALONE))
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(url)
        expect(page).not_to_have_title("Physarum", timeout=WAIT_MS)
        found, done = list[object](), 1
        for count in map(int, counts):
            for first in range(done, count + 1, AT_ONCE):
                page.evaluate(TAKE, [first, min(first + AT_ONCE, count + 1)])
            done = count + 1
            page.evaluate('choose("time", false)')
            page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
            legend = " ".join(page.locator("#steps .u-legend").inner_text().split())
            page.evaluate('choose("curves", false)')
            found.append({**page.evaluate(COUNT), "legend": legend})
        browser.close()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
