"""Verifies the tensors of a CPU engine one by one against those that the trainer sent. Pure.

The trainer computes the expected checksum of each tensor on each rank (actors/trainer/sending/expected.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from messages import EngineLayout
from runtime.models.fused import made_of, place_of

MAX_NAMED: Final = 3  # tensors named in a message; the others are counted
MAX_PARTS: Final = 4
TINY_ENGINE: Final = "physarum-embedded"  # the version that the tiny engine reports
_NUMBERS_OF_PARTS: Final = ("pp_size", "dp_size", "ep_size")

Hashes = Mapping[str, str]


def layout_of(info: Mapping[str, Any]) -> EngineLayout | None:
    """Return the layout of an engine whose checksums can be computed, from its /server_info; None otherwise.

    GPU engines hash differently. In half precision SGLang packs matrices on some CPUs, without reporting it.
    """
    plain = info.get("device") == "cpu" and info.get("dtype") == "float32" and info.get("quantization") is None
    if not plain or any(int(info.get(key) or 1) > 1 for key in _NUMBERS_OF_PARTS):
        return None
    tp_size, version = int(info.get("tp_size") or 1), info.get("version")
    return EngineLayout(tp_size=tp_size, dtype="float32", is_filled_up=version != TINY_ENGINE)


def tensors_mismatch(expected: Sequence[Hashes], said: Sequence[Hashes], came: Mapping[str, str]) -> str:
    """Return why an engine's tensors differ from those sent; empty if they are equal.

    Args:
        expected: checksums per rank, by the engine's tensor names.
        said: the engine's own checksums, in the same form.
        came: bucket of each received tensor, by Hugging Face names.
    """
    if len(said) != len(expected):
        return f"says the checksums of {len(said)} ranks, {len(expected)} were expected"
    unknown = [name for name in came if place_of(name).name not in expected[0]]
    if unknown:
        return f"was sent what is no tensor of the model: {_listed([f'{n} in {came[n]}' for n in unknown])}"
    wrong: dict[str, list[int]] = {}
    for rank, (own, theirs) in enumerate(zip(expected, said, strict=True)):
        for name in sorted(own.keys() | theirs.keys()):
            if own.get(name) != theirs.get(name):
                wrong.setdefault(name, []).append(rank)
    if not wrong:
        return ""
    described = [
        f"{name} on rank {', '.join(map(str, ranks))} ({_origin(name, came)})" for name, ranks in wrong.items()
    ]
    return f"holds other tensors than were sent: {_listed(described)}"


def _origin(name: str, came: Mapping[str, str]) -> str:
    """Describe the source tensors of an engine's tensor and the buckets that held them."""
    parts = made_of(name) or [each for each in came if place_of(each).name == name]
    shown = [f"{part}, which came in {came[part]}" if part in came else f"{part}, which never came" for part in parts]
    return "of " + _listed(shown, MAX_PARTS)


def _listed(items: Sequence[str], most: int = MAX_NAMED) -> str:
    more = len(items) - most
    return "; ".join(items[:most]) + (f"; and {more} more" if more > 0 else "")
