"""Open the page of a run in Chromium as its owner does, beside a server of another user. Runs in .venv-page.

Usage: owner.py URL TUNNEL FOREIGN RENEWED: the URL with the secret; the origin of a tunnel to the page; the origin of
the other server; a file whose content replaces the URL once it exists, after the file "opened" was written beside it.
Prints as JSON what the tabs showed, and what was left where.
"""

# pyright: basic, reportMissingImports=false
# playwright is installed in .venv-page alone

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from browse import ALONE, WAIT_MS
from playwright.sync_api import Page, expect, sync_playwright

SHOWN = "#status"


def main() -> None:
    url, tunnel, foreign, renewed = sys.argv[1:]
    origin, _, fragment = url.partition("#")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(ALONE))
        context = browser.new_context()
        found = dict[str, Any]()
        page = context.new_page()
        shows(page, url)
        found["address"] = page.url
        page.get_by_role("tab", name="Timeline").click()
        page.reload()
        shows(page)
        second = context.new_page()
        shows(second, origin)  # a tab without the secret gets it from the first one
        shows(context.new_page(), f"{tunnel}/#{fragment}")
        other = context.new_page()
        other.goto(f"{foreign}/?{origin}")  # its script asks the page for everything
        other.wait_for_function("window.done === true")
        found["foreign"] = other.evaluate("window.found")
        left = "[document.referrer, document.cookie, sessionStorage.length, window.opener === null]"
        with context.expect_page() as opened:
            page.evaluate(f"document.querySelector('h1').innerHTML = '<a target=_blank href={foreign}/opened>a</a>'")
            page.locator("h1 a").click()
        opened.value.wait_for_load_state()
        found["opened"] = opened.value.evaluate(left)
        page.goto(f"{foreign}/navigated")
        found["navigated"] = page.evaluate(left)
        page.go_back()
        shows(page)
        found["cookies"] = context.cookies()
        alone = browser.new_context().new_page()  # another browser of the same user
        alone.goto(origin)
        expect(alone.locator(SHOWN)).to_contain_text("watch RUN --url")
        Path(renewed).with_name("opened").touch()
        until = time.monotonic() + WAIT_MS / 1000
        while not Path(renewed).exists() and time.monotonic() < until:
            page.wait_for_timeout(50)
        for tab in (page, second):
            expect(tab.locator(SHOWN)).to_contain_text("watch RUN --url")
        shows(second, Path(renewed).read_text())  # only the fragment differs: the tab is not loaded again
        shows(page)
        browser.close()
    sys.stdout.write(json.dumps(found))


def shows(page: Page, url: str = "") -> None:
    """Wait until a tab shows the run."""
    page.set_default_timeout(WAIT_MS)
    if url:
        page.goto(url)
    expect(page.locator(SHOWN)).to_contain_text("events")


if __name__ == "__main__":
    main()
