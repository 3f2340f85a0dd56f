"""Rotary position embedding (RoPE) of a model, read from config.json."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from runtime.models.problems import Problems, Unsupported

PROPORTIONAL: Final = "proportional"
_HUGE: Final = 1e300  # a larger integer is no float
_OF_YARN: Final = (
    "rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings beta_fast beta_slow "
    "mscale mscale_all_dim"
).split()
_OF_HEADS: Final = ("truncate", "attention_factor")  # further keys, which models with latents do not have


class RopeKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The RoPE keys of config.json, as transformers 4 and 5 name them."""

    rope_theta: float | None = None  # transformers 4
    rope_scaling: dict[str, Any] | None = None  # transformers 4
    rope_parameters: dict[str, Any] | None = None  # transformers 5
    partial_rotary_factor: float | None = None  # default: the family's


class Yarn(msgspec.Struct, frozen=True, kw_only=True):
    """YaRN scaling of low frequencies, with the names of config.json."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    is_truncated: bool = True  # the bounds between scaled and other frequencies are whole numbers
    attention_factor: float | None = None  # of rotated queries and keys; None: it follows from the factor

    def mscale_of(self, mscale: float) -> float:
        """Return the growth of attention with the factor."""
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def stretched(self, frequencies: Sequence[float], theta: float) -> list[float]:
        """Divide low frequencies by the factor, keep high ones, interpolate between.

        Source:
            transformers, modeling_rope_utils._compute_yarn_parameters.
        """
        size = 2 * len(frequencies)
        low, high = (
            size * math.log(self.original_max_position_embeddings / (beta * 2 * math.pi)) / (2 * math.log(theta))
            for beta in (self.beta_fast, self.beta_slow)
        )
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low or 0.001
        shares = [min(max((index - low) / width, 0.0), 1.0) for index in range(len(frequencies))]
        return [
            frequency * (share / self.factor + 1.0 - share)
            for frequency, share in zip(frequencies, shares, strict=True)
        ]


class QueryGrowth(msgspec.Struct, frozen=True):
    """Factor of queries: 1 + beta * log(1 + floor(position / length))."""

    beta: float
    length: int  # of the original context, in positions


class Rope(msgspec.Struct, frozen=True):
    """RoPE parameters: the base, the rotated share of a head, and the scaling of low frequencies."""

    theta: float = 10000.0
    share: float = 1.0  # rotated share, from the front of each head
    factor: float = 1.0  # of rope_type "llama3"; 1: no scaling
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    yarn: Yarn | None = None  # of rope_type "yarn"
    divisor: float = 1.0  # of all frequencies, of rope_type "linear"
    proportion: float = 1.0  # of planes that are rotated, those of the highest frequencies: rope_type "proportional"
    growth: QueryGrowth | None = None  # of queries with their position
    is_interleaved: bool = False  # neighbouring coordinates are rotated, not those of both halves

    @property
    def is_stretched(self) -> bool:
        """Whether frequencies are scaled."""
        return self.factor != 1.0 or self.divisor != 1.0 or self.proportion != 1.0 or self.yarn is not None

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and of rotated keys, whose heads are projected directly."""
        if self.yarn is None:
            return 1.0
        if self.yarn.attention_factor is not None:
            return self.yarn.attention_factor
        return self.yarn.mscale_of(self.yarn.mscale) / self.yarn.mscale_of(self.yarn.mscale_all_dim)

    def stretched(self, frequencies: Sequence[float]) -> list[float]:
        """Scale the frequencies of a head's planes."""
        if self.yarn is not None:
            return self.yarn.stretched(frequencies, self.theta)
        if self.divisor != 1.0 or self.proportion != 1.0:
            rotated = int(self.proportion * len(frequencies))
            return [frequency / self.divisor * (index < rotated) for index, frequency in enumerate(frequencies)]
        return [self._stretched(frequency) for frequency in frequencies]

    def _stretched(self, frequency: float) -> float:
        """Scale as rope_type "llama3": stretch long wavelengths by `factor`, keep short ones, interpolate between.

        Source:
            transformers, modeling_rope_utils._compute_llama3_parameters.
        """
        if self.factor == 1.0:
            return frequency
        turns = self.original_max_position * frequency / (2 * math.pi)  # full turns within the original context
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        return frequency * (smooth + (1.0 - smooth) / self.factor)


def read_rope(
    keys: RopeKeys, *, share: float, stretching: str = "llama3", of_heads: bool = True, theta: float = 10000.0
) -> Rope:
    """Read RoPE parameters as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) writes them.

    Args:
        keys: of config.json.
        share: default share of a head that models of this architecture rotate.
        stretching: the only rope_type besides "default" that is supported for this architecture.
        of_heads: heads are projected directly, and rotated as a whole.
        theta: base of models of this architecture if no key has it.

    Raises:
        ValueError: a key is unsupported; the text names it.
    """
    parameters: dict[str, Any] = dict(keys.rope_scaling or {}) | dict(keys.rope_parameters or {})
    problems = Problems()
    usual = keys.rope_theta or theta
    theta = problems.of(lambda: _number(parameters, "rope_theta", usual)) or 0.0
    if not theta > 0 and not problems:
        problems.append(f"rope_theta {theta} is not a positive number")
    kinds = [_kind(given) for given in (keys.rope_scaling, keys.rope_parameters) if given]
    kind = next((kind for kind in kinds if kind != "default"), "default")
    given = None if kind == PROPORTIONAL else parameters.get("partial_rotary_factor", keys.partial_rotary_factor)
    if share == 1.0 and given not in (None, 1.0):
        problems.append("partial_rotary_factor other than 1 is not supported")
    elif given is not None:
        share = problems.of(lambda: _number({"partial_rotary_factor": given}, "partial_rotary_factor")) or share
    rope = problems.of(lambda: _scaled(kind, kinds, theta, parameters, share, stretching, of_heads))
    if rope is None or problems:
        raise Unsupported(problems)
    return rope


def _scaled(
    kind: str,
    kinds: Sequence[str],
    theta: float,
    parameters: Mapping[str, Any],
    share: float,
    stretching: str,
    of_heads: bool,
) -> Rope:
    if kind == "default":
        return Rope(theta=theta, share=share)
    if kind != stretching or share != 1.0:
        supported = ", ".join(map(repr, dict.fromkeys(("default", stretching))))
        raise ValueError(f"rope_type {kind!r} is not supported; supported: {supported}")
    if len(set(kinds)) > 1:
        raise ValueError(
            f"rope_type is {kinds[0]!r} in rope_scaling and {kinds[1]!r} in rope_parameters: they must be equal"
        )
    try:
        if kind == "linear":
            return Rope(theta=theta, divisor=_number(parameters, "factor"))
        if kind == PROPORTIONAL:
            return _proportional(theta, parameters)
        return _yarn(theta, parameters, of_heads) if kind == "yarn" else _llama3(theta, parameters)
    except KeyError as error:
        raise ValueError(f"rope_type {kind!r} lacks {error}") from error


def _kind(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def _number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a parameter as a float; the default if it is absent, null or 0.

    Raises:
        KeyError: it is absent and has no default.
        ValueError: it is not a finite number.
    """
    value = parameters[key] if default is None else parameters.get(key) or default
    number = float(value) if isinstance(value, int | float) and abs(value) < _HUGE else math.nan
    if math.isnan(number):
        raise ValueError(f"{key} {value!r} is not a finite number")
    return number


def _llama3(theta: float, parameters: Mapping[str, Any]) -> Rope:
    return Rope(
        theta=theta,
        factor=_number(parameters, "factor"),
        low_freq_factor=_number(parameters, "low_freq_factor"),
        high_freq_factor=_number(parameters, "high_freq_factor"),
        original_max_position=int(_number(parameters, "original_max_position_embeddings")),
    )


def _proportional(theta: float, parameters: Mapping[str, Any]) -> Rope:
    """Read as transformers (modeling_rope_utils._compute_proportional_rope_parameters) does."""
    proportion = _number(parameters, "partial_rotary_factor", 1.0)
    if not 0.0 < proportion <= 1.0:
        raise ValueError(f"partial_rotary_factor {proportion} of rope_type 'proportional' is not in 0..1")
    return Rope(theta=theta, proportion=proportion, divisor=_number(parameters, "factor", 1.0))


def _yarn(theta: float, parameters: Mapping[str, Any], of_heads: bool) -> Rope:
    """Read as transformers (modeling_rope_utils._compute_yarn_parameters) and yarn_apply_mscale do."""
    known = (*_OF_YARN, *_OF_HEADS) if of_heads else _OF_YARN
    if other := [key for key, value in parameters.items() if key not in known and value is not None]:
        raise ValueError(f"{other[0]} of rope_type 'yarn' is not supported: it may change what the model computes")
    mscale, all_dim = (_number(parameters, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    if all_dim and not mscale:
        raise ValueError("mscale_all_dim of rope_type 'yarn' is not supported without mscale")
    if not isinstance(truncate := parameters.get("truncate", True), bool):
        raise ValueError(f"truncate {truncate!r} of rope_type 'yarn' is not true or false")
    yarn = Yarn(
        factor=_number(parameters, "factor"),
        original_max_position_embeddings=int(_number(parameters, "original_max_position_embeddings")),
        beta_fast=_number(parameters, "beta_fast", 32.0),
        beta_slow=_number(parameters, "beta_slow", 1.0),
        mscale=mscale if all_dim else 1.0,  # has no effect alone
        mscale_all_dim=all_dim,
        is_truncated=truncate,
        attention_factor=_number(parameters, "attention_factor", 0.0) or None,
    )
    if not yarn.factor >= 1.0 or yarn.original_max_position_embeddings < 1:
        raise ValueError("factor of rope_type 'yarn' is below 1, or original_max_position_embeddings is not positive")
    return Rope(theta=theta, yarn=yarn)
