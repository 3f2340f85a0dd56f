"""Write the pages of docs/reference/ that are generated from settings, or check that they are current."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bin.entry import docs_folder, parser_of
from runtime.settings.reading.hints import adapters
from runtime.settings.reference.combinations import combinations_page
from runtime.settings.reference.functions import functions_page
from runtime.settings.reference.page import settings_page
from runtime.settings.rules.limits import limits_page

PAGES: Final[dict[str, Callable[[], str]]] = {  # file in docs/reference/, and the function that returns its text
    "combinations.md": combinations_page,
    "functions.md": functions_page,
    "limits.md": limits_page,
    "settings.md": settings_page,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, or 1 if --check finds a stale page."""
    parser = parser_of("describe-settings", __doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing, and exit with 1 if a page is not current.")
    parser.add_argument("--docs", type=Path, default=docs_folder(), help="Directory to write to.")
    args = parser.parse_args(argv)
    pages = PAGES | {name: text for adapter in adapters() for name, text in adapter.pages.items()}
    texts = {args.docs / name: text() for name, text in sorted(pages.items())}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if args.check:
            print(f"{path}: not current: run bin/describe-settings", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
    return 1 if args.check and stale else 0
