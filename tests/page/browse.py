"""Open the page of a run in Chromium, go through its views, and print as JSON what they show. Runs in .venv-page.

Each view is chosen by its tab, in a wide light window and in a narrow dark one, and then all of them by their keys.

Usage: browse.py URL DIRECTORY; the directory gets a screenshot of each view.
"""

# pyright: basic, reportMissingImports=false
# playwright is installed in .venv-page alone

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

WAIT_MS: Final = 120_000  # for what a page loads
SIZES: Final = ((1280, 900, "light"), (390, 844, "dark"))
ALONE: Final = (  # so that it asks for nothing but the page
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


# What is wider than the window, with the elements that are, unless one of them scrolls.
WIDER: Final = """() => {
  if (document.documentElement.scrollWidth <= innerWidth) return [];
  const wide = [...document.querySelectorAll("body *")].filter((one) => one.getBoundingClientRect().right > innerWidth);
  return wide.filter((one) => !one.closest(".scroll")).map((one) => `${one.tagName} ${one.id} ${one.className}`);
}"""


def main() -> None:
    url, directory = sys.argv[1], Path(sys.argv[2])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(ALONE))
        found = [_seen(browser, url, directory, *size) for size in SIZES]
        browser.close()
    sys.stdout.write(json.dumps(found))


def _seen(browser: Browser, url: str, directory: Path, width: int, height: int, scheme: Any) -> dict[str, Any]:
    """Return what went wrong, and the text and the width of each view, in a window of one size."""
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    wrong = list[str]()

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            wrong.append(f"console: {message.text}")

    page.on("console", said)
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("response", lambda answer: wrong.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
    page.on(
        "request", lambda asked: wrong.append(f"asked {asked.url}") if not asked.url.startswith(_origin(url)) else None
    )
    page.goto(url)
    expect(page).not_to_have_title("Physarum")
    views = dict[str, Any]()
    tabs = page.get_by_role("tab").all()
    for tab in tabs:
        tab.click()
        name = str(tab.get_attribute("aria-controls"))
        view = page.locator(f"#{name}")
        view.wait_for(state="visible")
        if name == "view-samples":  # asked for by the page
            first = page.locator("#samples-list button").first
            first.or_(page.locator("#samples-state", has_text="run.dump_details")).wait_for()
            if first.is_visible():
                first.click()
                page.locator("#samples-group:not(:empty)").wait_for()
        page.screenshot(path=directory / f"{name}-{width}.png")
        overflow = page.evaluate(WIDER)
        views[name] = {"text": view.inner_text(), "overflow": overflow}
        if name == "view-samples":
            page.locator("#samples-search").fill("say")
    for number, tab in enumerate(tabs, 1):
        page.keyboard.press(str(number))
        page.locator(f"#{tab.get_attribute('aria-controls')}").wait_for(state="visible")
    _read_on(page)
    status = page.locator("#status").inner_text()
    marked = page.evaluate("window.marked === undefined")  # a script that a text of the run smuggled in would set it
    return {"width": width, "status": status, "views": views, "wrong": wrong, "clean": marked}


def _read_on(page: Page) -> None:
    """See that a search and a group wait for the dumps to be read, also while another view is shown."""
    samples, ledger = page.get_by_role("tab", name="Samples"), page.get_by_role("tab", name="Ledger")
    page.evaluate("location.hash = 'group=0'")
    expect(samples).to_have_attribute("aria-selected", "true")
    ledger.click()
    expect(page.locator("#samples-group")).to_contain_text(re.compile(r"Group 0, files|no group 0|keeps no samples"))
    expect(ledger).to_have_attribute("aria-selected", "true")
    samples.click()
    expect(page.locator("#samples-state")).not_to_contain_text("not read yet")


def _origin(url: str) -> str:
    return url.partition("#")[0]


if __name__ == "__main__":
    main()
