"""Verifies an engine's weights against the published version. Pure: the IO is in verifier.py.

Four properties are compared; each detects errors that the others miss:

- The label shows that the engine considers the update complete.
- The engine's checksums of its tensors are compared with those that the trainer computed of what it published, where an
  engine's layout allows it. This detects any change on the way, one bit included, also to the first engine.
- The engine's own checksum is compared with those of all engines with the same layout. Equal files must give equal
  checksums, different files different ones. This detects an engine that reports success and loads nothing, however
  small a train step is.
- The engine's log-probs of the probe are compared with the trainer's. This detects weights that are wrong on all
  engines, such as a tensor that was never sent, or random weights. It misses what changes less than the tolerance,
  which follows from what rounding does to the trainer's own log-probs of these tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from actors.rollout.sglang.control_answers import ChecksumAnswer
from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.facts import LAYOUT_KEYS, TINY_ENGINE
from messages import EngineSums, WeightProbe, WeightsAnnounced
from runtime.models.checksums import DIGITS, digits_of
from runtime.settings.tables.engines import Verify, WeightFormat

SMALL_BYTES: Final = 4 << 30  # size of the files: 1e9 parameters in float32, or 2e9 in bfloat16
NUM_SPREADS: Final = 2.5  # measured: engines differ by 0.4 to 0.8 spreads on prompts, up to 1.7 on random tokens
FLOORS: Final = {"float32": 1e-3, "bfloat16": 2e-2}  # in nats, where the spread is smaller or was not measured
QUANTIZED: Final = 3e-1  # in nats, what FP8 or another quantization of the engine adds; an estimate, not measured
IMPOSSIBLE: Final = 3e-1  # in nats: without quantization, no rounding explains a larger difference
NUM_KNOWN: Final = 256  # weight versions with remembered checksums, per layout

Layout = tuple[str, ...]


class WeightsMismatch(EngineError):
    """An engine does not hold the announced weights."""


class ServerInfo(NamedTuple):
    """The part of /server_info that matters for weights."""

    layout: Layout  # engines with equal layouts have equal tensors for equal files
    dtype: str
    quantized: bool
    tp_size: int = 1
    is_padded: bool = True  # pads tensors as SGLang does; the tiny engine does not
    is_plain: bool = False  # on one CPU or several, sharded by tensor parallelism alone


def server_of(info: Mapping[str, Any]) -> ServerInfo:
    """Return the part of a /server_info response that matters for weights."""
    quantized = info.get("quantization") is not None
    others = ("pp_size", "dp_size", "ep_size")
    return ServerInfo(
        tuple(str(info.get(key)) for key in LAYOUT_KEYS),
        str(info.get("dtype")),
        quantized,
        tp_size=int(info.get("tp_size") or 1),
        is_padded=info.get("version") != TINY_ENGINE,
        is_plain=info.get("device") == "cpu" and not quantized and all(info.get(key) in (None, 1) for key in others),
    )


def is_thorough(verify: Verify | None, announced: WeightsAnnounced, *, first: bool) -> bool:
    """Whether to verify more than the label; `first`: the first update since the engine was last not ready."""
    if verify is None:
        verify = "always" if announced.size_bytes <= SMALL_BYTES else "first"
    return verify == "always" or (verify == "first" and first)


def label_mismatch(label: str, answered: str | None) -> str:
    """Return why an engine's label shows an incomplete update; empty if it matches."""
    return "" if answered == label else f"reports weights {answered!r}, expected {label!r}"


class ProbeGate(NamedTuple):
    """How far an engine's log-probs of the probe may differ from the trainer's, and why."""

    tolerance: float  # in nats
    spread: float | None  # the trainer's own, in nats; None: it measured none
    dtype: str  # the coarser one of trainer and engine

    @property
    def text(self) -> str:
        """The tolerance and its reason, for people."""
        if self.spread is None:
            return f"allowed: {self.tolerance:.2g}, for {self.dtype}"
        return f"allowed: {self.tolerance:.2g}; rounding in {self.dtype} moves the trainer's own by {self.spread:.2g}"


def gate_of(
    probe: WeightProbe, server: ServerInfo, trainer_dtype: str, weight_format: WeightFormat = "as_trained"
) -> ProbeGate:
    """Return how far log-probs of the same weights may differ, given the format in which the engine receives them."""
    exact = server.dtype == trainer_dtype == "float32" and weight_format == "as_trained"
    dtype = "float32" if exact else "bfloat16"
    spread = probe.spreads.get(dtype)
    tolerance = min(max(FLOORS[dtype], NUM_SPREADS * (spread or 0.0)), IMPOSSIBLE)
    if server.quantized or weight_format == "fp8":
        return ProbeGate(tolerance + QUANTIZED, spread, f"{dtype} and quantization")
    return ProbeGate(tolerance, spread, dtype)


def probe_mismatch(probe: WeightProbe, answered: Sequence[float | None], gate: ProbeGate) -> str:
    """Return why an engine's log-probs differ from a probe's; empty if they match.

    Compares the mean absolute difference. In bfloat16 two correct implementations may differ in a single token by more
    than any useful bound; a wrong tensor shifts all tokens.

    Args:
        probe: as announced.
        answered: the engine's log-prob of each token; the first is ignored.
        gate: how far they may differ.
    """
    difference = probe_difference(probe, answered)
    if difference <= gate.tolerance:  # NaN does not pass
        return ""
    return f"its log-probs of the probe differ from the trainer's by {difference:.2g} nats on average; {gate.text}"


def probe_difference(probe: WeightProbe, answered: Sequence[float | None]) -> float:
    """Return the mean absolute difference in nats; infinite if a token or value is missing."""
    if len(answered) != len(probe.log_probs):
        return math.inf
    pairs = list(zip(probe.log_probs, answered, strict=True))[1:]
    return sum(math.inf if given is None else abs(expected - given) for expected, given in pairs) / len(pairs)


def holds_all_digits(server: ServerInfo, trainer_dtype: str, weight_format: WeightFormat = "as_trained") -> bool:
    """Whether different files, or different tensors of a weight sync, always become different tensors on the engine.

    That holds if no digits are rounded away. An engine may rescale FP8 weights for its computation.
    """
    came_in = trainer_dtype if weight_format == "as_trained" else "bfloat16"
    return server.dtype in (came_in, "float32") and not server.quantized and weight_format != "fp8"


def why_not_compared(server: ServerInfo, sums: EngineSums | None, no_sums: str, found: ChecksumAnswer) -> str:
    """Return why an engine's tensors are not compared with the trainer's own sums; empty if they are."""
    if not found.per_engine_checksum or not found.ranks:
        return "it reports no checksums"
    if sums is None:
        return no_sums or "the trainer announced no sums of them"
    announced = (sums.tp_size, sums.dtype, sums.is_padded)
    if not server.is_plain or announced != (server.tp_size, server.dtype, server.is_padded):
        return (
            f"the trainer announced sums for {sums.dtype} over {sums.tp_size} ranks on the CPU, it has another layout"
        )
    return ""


def sums_mismatch(sums: EngineSums, found: ChecksumAnswer) -> str:
    """Return which of an engine's tensors differ from the trainer's, by its own sums; empty if none does."""
    if found.per_engine_checksum == sums.checksum:
        return ""
    ranks = [rank.checksums for rank in found.ranks]
    names = sorted({name for rank in ranks for name in rank})
    digits = digits_of(ranks)
    if len(digits) != len(sums.tensors):
        return f"it holds {len(names)} tensors, the trainer announced {len(sums.tensors) // DIGITS}"
    starts = range(0, len(digits), DIGITS)
    wrong = [
        name
        for name, start in zip(names, starts, strict=True)
        if digits[start : start + DIGITS] != sums.tensors[start : start + DIGITS]
    ]
    first = f"the first is {wrong[0]}" if wrong else "none of which by its first digits"
    return f"{len(wrong)} of its {len(names)} tensors differ from the trainer's sums; {first}"


class _VerifiedChecksums(NamedTuple):
    files: str
    tensors: str
    engine: str  # the first engine that verified them


class KnownChecksums:
    """Maps checksums of files to checksums of tensors per layout, from verified engines."""

    def __init__(self) -> None:
        self._seen: dict[Layout, dict[str, _VerifiedChecksums]] = {}  # by checksum of the files, oldest first

    def mismatch(self, server: ServerInfo, files: str, tensors: str | None, *, all_digits: bool) -> str:
        """Return why an engine cannot hold these files; empty if there is no contradiction.

        Args:
            server: the engine's properties.
            files: the announced checksum.
            tensors: the engine's own checksum; None: it reports none, so there is nothing to compare.
            all_digits: different files always give different tensors on this engine.
        """
        if not tensors:
            return ""
        seen = self._seen.get(server.layout, {})
        same = seen.get(files)
        if same is not None and same.tensors != tensors:
            return f"its checksum is {tensors[:12]}, that of {same.engine} is {same.tensors[:12]} for the same files"
        before = next((each for each in seen.values() if each.tensors == tensors and each.files != files), None)
        if all_digits and before is not None:
            return f"its checksum is {tensors[:12]}, that of {before.engine} for other files: it did not load these"
        return ""

    def tensors(self, server: ServerInfo, files: str) -> str | None:
        """Return the tensor checksum of verified engines with this layout for these files; None if there is none."""
        seen = self._seen.get(server.layout, {}).get(files)
        return None if seen is None else seen.tensors

    def add(self, layout: Layout, engine: str, files: str, tensors: str) -> None:
        """Record the checksums of a verified engine."""
        seen = self._seen.setdefault(layout, {})
        seen.setdefault(files, _VerifiedChecksums(files, tensors, engine))
        if len(seen) > NUM_KNOWN:
            del seen[next(iter(seen))]
