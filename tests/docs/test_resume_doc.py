"""docs/run/resume-and-export.md names the settings that a resumed run may change, and those that it may not."""

import re
from pathlib import Path

from runtime.node.claims.rundir import HARMLESS, LASTING, LASTING_OF_REWARD, LASTING_OF_TRAINER

PAGE = Path(__file__).parents[2] / "docs" / "run" / "resume-and-export.md"


def test_the_page_names_what_a_resumed_run_may_change_and_what_not() -> None:
    (paragraph,) = (each for each in PAGE.read_text().split("\n\n") if each.startswith("When you resume, you may"))
    refused, allowed = paragraph.split("is refused and named.")
    lasting = (*LASTING, *LASTING_OF_REWARD, *LASTING_OF_TRAINER)
    assert _last_parts(refused) == {key.rpartition(".")[2] for key in lasting}
    assert _last_parts(allowed) == {"train"} | {key.removeprefix("train.") for key in HARMLESS}


def _last_parts(text: str) -> set[str]:
    """Names in code style, without brackets and without the table before a dot."""
    return {name.strip("[]").rpartition(".")[2] for name in re.findall(r"`([^`]+)`", text)}
