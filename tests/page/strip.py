"""Open pages in Chromium, and print as JSON what their strips show. Runs in .venv-page.

Usage: strip.py DIRECTORY URL...: each URL in a wide and in a narrow window, light and dark. The tabs of the last two
URLs stay open: once all are read, the file "opened" is written, and the last two pages are to be ended; of these, the
words are printed that their strips show then.
"""

# pyright: basic, reportMissingImports=false
# playwright is installed in .venv-page alone

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from browse import ALONE, WAIT_MS
from playwright.sync_api import Page, expect, sync_playwright

SIZES: Final = ((1400, 900, "light"), (1400, 900, "dark"), (390, 844, "light"), (390, 844, "dark"))
BADGE: Final = "#health-state .badge"
READ: Final = """() => {
  const opaque = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const texts = [...document.querySelectorAll("#health .badge, #health .why, #health dt, #health dd, #health a")];
  const cells = [...document.querySelectorAll("#health-numbers > div")];
  const lines = (element) => { // of a text: a word that is broken has more than one
    const range = document.createRange();
    range.selectNodeContents(element);
    return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size;
  };
  return {
    numbers: Object.fromEntries(cells.map((cell) => [...cell.children].map((one) => one.innerText.trim()))),
    curves: [...document.querySelectorAll("#health svg")].map((svg) => svg.getAttribute("aria-label")),
    colours: texts.map((element) => [element.innerText, getComputedStyle(element).color, opaque(element)]),
    bar: getComputedStyle(document.querySelector("header")).borderTopColor,
    badge: getComputedStyle(document.querySelector("#health .badge")).backgroundColor,
    broken: texts.filter((one) => one.matches(".badge, dt") && lines(one) > 1).map((one) => one.innerText),
    overflow: document.documentElement.scrollWidth - innerWidth,
  };
}"""


RESPONSES: Final = '[["83", ""], ["83"], [""], []].map((responses) => listedResponses({ responses }))'
EQUAL: Final = 'Object.fromEntries(distinct(["a", "b", "c"], [[1, null, 2], [1, null, 2], [1, 0, 2]]))'


def main() -> None:
    directory, *urls = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(ALONE))
        shown = list[dict[str, Any]]()
        tabs = list[Page]()
        for width, height, scheme in SIZES:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            for number, url in enumerate(urls):
                page = context.new_page()
                page.set_default_timeout(WAIT_MS)
                page.goto(url)
                expect(page).not_to_have_title("Physarum", timeout=WAIT_MS)
                found = {
                    "page": number,
                    "width": width,
                    "scheme": scheme,
                    "views": list[bool](),
                    "legends": list[str](),
                }
                for tab in page.get_by_role("tab").all() if scheme == "light" else ():
                    tab.click()
                    found["views"].append(page.locator(BADGE).is_visible())
                if number == 0:
                    page.get_by_role("tab", name="Curves").click()
                    found["legends"].append(legend(page))
                    found["curves_of"] = page.evaluate(EQUAL)
                    found["responses"] = page.evaluate(RESPONSES)
                    page.locator("#view-curves .u-over").first.hover()
                    page.mouse.move(0, 0)
                    found["legends"].append(legend(page))
                found["words"] = page.locator("#health-state").inner_text()
                shown.append({**found, **page.evaluate(READ)})
                page.screenshot(path=Path(directory) / f"strip-{number}-{width}-{scheme}.png")
                if number < len(urls) - 2:
                    page.close()
                else:
                    tabs.append(page)
        (Path(directory) / "opened").touch()
        ended = list[str]()
        for page in tabs:
            while not page.evaluate("isLost"):
                page.wait_for_timeout(50)
            ended.append(page.locator("#health-state").inner_text())
        browser.close()
    sys.stdout.write(json.dumps({"shown": shown, "ended": ended}))


def legend(page: Page) -> str:
    """The legend of the first curve."""
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    return " ".join(page.locator("#view-curves .u-legend").first.inner_text().split())


if __name__ == "__main__":
    main()
