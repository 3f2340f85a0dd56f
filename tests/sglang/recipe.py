"""The laptop recipe on SGLang's own server, with what depends on where it is tried."""

from typing import Final

from tests.sglang.server import ROOT, SHIM, sglang_python

RECIPE: Final = ROOT / "tests" / "sglang" / "laptop.toml"
DEMO: Final = ROOT / "topologies" / "demo"
HERE: Final[dict[str, object]] = {
    "engines.policy.python": sglang_python(),
    "engines.policy.env.PYTHONPATH": SHIM,
    "model.hf_checkpoint": DEMO / "models/reverse-digits",
    "data.0.path": DEMO / "data/reverse-digits/train.jsonl",
    "eval.0.path": DEMO / "data/reverse-digits/eval.jsonl",
}


def overrides(**settings: object) -> list[str]:
    """As `--set` takes them."""
    return [f"{key}={value}" for key, value in {**HERE, **settings}.items()]
