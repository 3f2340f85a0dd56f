"""The laptop recipe on SGLang's own server, with paths that work from any directory."""

import os
from typing import Final

from tests.sglang.server import PYTHON_VARIABLE, ROOT

RECIPE: Final = ROOT / "tests" / "sglang" / "laptop.toml"
DEMO: Final = ROOT / "topologies" / "demo"
ELSEWHERE: Final = os.environ.get(PYTHON_VARIABLE)  # another interpreter with SGLang than that of .venv-sglang
HERE: Final[dict[str, object]] = {"engines.policy.python": ELSEWHERE} if ELSEWHERE else {}


def overrides(**settings: object) -> list[str]:
    """Format settings for `--set`."""
    return [f"{key}={value}" for key, value in {**HERE, **settings}.items()]
