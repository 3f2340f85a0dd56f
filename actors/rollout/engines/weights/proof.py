"""Whether what an engine says of its weights fits what was announced. Pure: the asking is in prover.py.

Four things are compared, each of which misses what another one sees:

- the label, which says that the engine took the load for done;
- its own checksum with those of all engines of the same layout: the same files give the same checksum, other files give
  another. That finds an engine that says yes and loads nothing, however small a train step is;
- its log-probs of the probe with the trainer's. That finds weights that are wrong for everybody, such as a tensor that
  was never sent, or drawn ones. It cannot find a train step that changes less than the tolerance.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from actors.rollout.sglang.errors import EngineError
from messages import WeightProbe, WeightsAnnounced
from runtime.settings.topology import Verify, WeightFormat

SMALL_BYTES: Final = 4 << 30  # of files: a model of 1e9 parameters in float32, or 2e9 in bfloat16
TOLERANCE: Final = 1e-3  # nats, where trainer and engine compute in float32
ROUGH_TOLERANCE: Final = 2e-2  # where one of them does not
FP8_TOLERANCE: Final = 3e-1  # where the engine computes in FP8; a guess: no such engine was asked yet
NUM_KNOWN: Final = 256  # sets of weights whose checksums are remembered, of each layout
LAYOUT_KEYS: Final = (
    *("version", "device", "dtype", "quantization", "tp_size", "pp_size", "dp_size", "ep_size", "nnodes"),
    *("enable_dp_attention", "attention_backend", "moe_runner_backend", "json_model_override_args"),
)

Layout = tuple[str, ...]


class WeightsMismatch(EngineError):
    """An engine does not hold what was announced."""


class ServerInfo(NamedTuple):
    """What a server's /server_info says that matters for its weights."""

    layout: Layout  # engines of one layout have equal tensors for equal files
    dtype: str
    quantized: bool


def server_of(info: Mapping[str, Any]) -> ServerInfo:
    """Read an answer of /server_info."""
    quantization = info.get("quantization")
    return ServerInfo(
        tuple(str(info.get(key)) for key in LAYOUT_KEYS), str(info.get("dtype")), quantization is not None
    )


def is_thorough(verify: Verify | None, announced: WeightsAnnounced, *, first: bool) -> bool:
    """Whether more than the label is asked of this load; `first` since the engine was last not admitted."""
    if verify is None:
        verify = "always" if announced.size_bytes <= SMALL_BYTES else "first"
    return verify == "always" or (verify == "first" and first)


def label_mismatch(label: str, answered: str | None) -> str:
    """Why an engine did not take a load for done; empty when it did."""
    return "" if answered == label else f"calls its weights {answered!r}, it was to load {label!r}"


def probe_mismatch(probe: WeightProbe, answered: Sequence[float | None], *, tolerance: float) -> str:
    """Why log-probs are not those of a probe; empty when they are.

    The mean of the absolute differences is compared, since in bfloat16 two right implementations may differ in a single
    token by more than any useful bound; a wrong tensor moves them all.

    Args:
        probe: as announced.
        answered: the engine's, of each token; the first is not looked at.
        tolerance: in nats.
    """
    difference = probe_difference(probe, answered)
    if difference <= tolerance:  # not a number is neither
        return ""
    return f"its log-probs of the probe differ from the trainer's by {difference:.2g} in the mean, over {tolerance:g}"


def probe_difference(probe: WeightProbe, answered: Sequence[float | None]) -> float:
    """Mean absolute difference in nats; infinite where a token or a number is missing."""
    if len(answered) != len(probe.log_probs):
        return math.inf
    pairs = list(zip(probe.log_probs, answered, strict=True))[1:]
    return sum(math.inf if given is None else abs(expected - given) for expected, given in pairs) / len(pairs)


def tolerance_of(server: ServerInfo, trainer_dtype: str, weight_format: WeightFormat = "as_trained") -> float:
    """How far log-probs of the same weights may be apart, of which the engine gets those of a format."""
    if weight_format == "fp8":
        return FP8_TOLERANCE
    exact = server.dtype == trainer_dtype == "float32" and not server.quantized and weight_format == "as_trained"
    return TOLERANCE if exact else ROUGH_TOLERANCE


def holds_all_digits(server: ServerInfo, trainer_dtype: str, weight_format: WeightFormat = "as_trained") -> bool:
    """Whether files, or what a session brings, that differ become tensors that differ there.

    None of their digits are rounded away. What comes in FP8 an engine may scale otherwise to compute with it.
    """
    came_in = trainer_dtype if weight_format == "as_trained" else "bfloat16"
    return server.dtype in (came_in, "float32") and not server.quantized and weight_format != "fp8"


class _Seen(NamedTuple):
    files: str
    tensors: str
    engine: str  # that was the first to prove them


class KnownChecksums:
    """Which checksum of files goes with which checksum of tensors, in each layout, as proven engines had them."""

    def __init__(self) -> None:
        self._seen: dict[Layout, dict[str, _Seen]] = {}  # by files, oldest first

    def mismatch(self, server: ServerInfo, files: str, tensors: str | None, *, all_digits: bool) -> str:
        """Why an engine cannot hold these files; empty when nothing speaks against it.

        Args:
            server: what the engine is.
            files: the announced checksum.
            tensors: the engine's own; none: it has not said it.
            all_digits: files that differ become tensors that differ there.
        """
        if not tensors:
            return "does not say the checksum of its weights"
        seen = self._seen.get(server.layout, {})
        same = seen.get(files)
        if same is not None and same.tensors != tensors:
            return f"its checksum is {tensors[:12]}, that of {same.engine} is {same.tensors[:12]} from the same files"
        before = next((each for each in seen.values() if each.tensors == tensors and each.files != files), None)
        if all_digits and before is not None:
            return f"its checksum is {tensors[:12]}, as that of {before.engine} was from other files: it loaded nothing"
        return ""

    def tensors(self, server: ServerInfo, files: str) -> str | None:
        """What proven engines of a layout say of these files; none: nobody proved them."""
        seen = self._seen.get(server.layout, {}).get(files)
        return None if seen is None else seen.tensors

    def add(self, server: ServerInfo, engine: str, files: str, tensors: str) -> None:
        """Note what a proven engine has."""
        seen = self._seen.setdefault(server.layout, {})
        seen.setdefault(files, _Seen(files, tensors, engine))
        if len(seen) > NUM_KNOWN:
            del seen[next(iter(seen))]
