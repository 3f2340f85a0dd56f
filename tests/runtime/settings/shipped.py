"""The shipped topologies, and the problems of one with other settings."""

from pathlib import Path

import pytest

from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError

ROOT = Path(__file__).resolve().parents[3]
LAPTOP = ROOT / "topologies/laptop.toml"
COLOCATE = ROOT / "topologies/colocate-8gpu.toml"
DISAGGREGATE = ROOT / "topologies/disaggregate-2x8gpu.toml"
BOXED_COPY_SFT = ROOT / "topologies/boxed-copy-sft.toml"
PLACES = ("*.toml", "examples/*.toml", "slime/*.toml")
SHIPPED = sorted(path for place in PLACES for path in (ROOT / "topologies").glob(place))


def problems(path: Path, *overrides: str) -> dict[str, str]:
    """Message by key."""
    with pytest.raises(TopologyError) as caught:
        load_topology(path, overrides)
    return {problem.key: problem.message for problem in caught.value.problems}
