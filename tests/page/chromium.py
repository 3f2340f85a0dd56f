"""Pages of runs, opened in Debian's Chromium by a process of .venv-page."""

import asyncio
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
REQUIRED: Final = "PHYSARUM_PAGE"  # "required": fail without Chromium; bin/test --all sets it unless it is set
SETUP_S: Final = 600  # another call may have to end first
BROWSE_S: Final = 350


@cache
def missing() -> str:
    """Make what these tests need, and return why that failed."""
    command = [ROOT / "bin" / "setup", "--page-tests", "--if-needed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SETUP_S, check=False)
    return done.stderr if done.returncode else ""


def needs_chromium() -> None:
    """Skip the test that runs where Chromium is missing and cannot be installed; fail it where it is required."""
    if reason := missing():
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(f"{reason}\nTo run the rest: {REQUIRED}=skip bin/test --all", pytrace=False)
        pytest.skip(f"cannot run here, because {reason}")


async def browsed(url: str, directory: Path) -> dict[int, dict[str, Any]]:
    """Go through all views of a page in a wide window and a narrow one, and return what each showed by its width.

    Args:
        url: of the page, with its token.
        directory: exists; gets a screenshot of each view.
    """
    return {each["width"]: each for each in await visited("browse.py", url, str(directory))}


async def visited(script: str, *arguments: str) -> Any:
    """Run a script of this folder in .venv-page, and return what it printed."""
    command = [ROOT / ".venv-page" / "bin" / "python", Path(__file__).parent / script, *arguments]
    browser = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        printed, _ = await asyncio.wait_for(browser.communicate(), BROWSE_S)
    finally:
        if browser.returncode is None:
            browser.kill()
            await browser.wait()
    assert browser.returncode == 0, arguments
    return json.loads(printed)
