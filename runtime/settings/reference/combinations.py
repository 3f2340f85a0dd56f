"""Generates docs/reference/combinations.md from the classes of losses and estimators."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, get_args

from runtime.settings.reading.config import type_of
from runtime.settings.rules.algorithm import OF_ESTIMATOR, OF_LOSS, allows
from runtime.settings.tables.estimators import Estimator
from runtime.settings.tables.losses import Loss

HEAD: Final = """# What combines

Written by `bin/describe-settings` from `runtime/settings/tables/losses.py` and `estimators.py`; do not edit.

Every loss combines with every estimator, correction, KL estimate and reduction, but for what this page says. `--check`
refuses the rest, with the reason. A test computes every pair of estimator and loss. All settings are in `[algorithm]`;
the keys of each type are in [settings](settings.md).
"""


def combinations_page() -> str:
    """Return the text of docs/reference/combinations.md."""
    losses = [table for table in get_args(Loss) if table.learns_from == "samples"]
    return "\n".join([HEAD, *_losses(losses), "", *_estimators(get_args(Estimator)), ""])


def _losses(losses: Sequence[Any]) -> Iterator[str]:
    yield "## Loss and correction\n"
    yield "Losses without a correction compare with the engine themselves.\n"
    yield from _head(["`loss.type`", *(f"`{name}`" for name in OF_LOSS), "`bypass_mode` with `tis`"])
    for loss in losses:
        fits = [*(allows(loss, name) for name in OF_LOSS), not loss.has_ratio]
        yield _row([f"`{type_of(loss)}`", *map(_answer, fits)])
    yield ""
    yield "- `tis` and `rs` need old log-probs of the trainer: not with `use_rollout_logprobs`, unless"
    yield "  `bypass_mode = true`."
    yield "- `bypass_mode` with `tis`: other losses would count a ratio twice."
    yield "- `bypass_mode` with `rs` alone: `gpg`, or any loss with `use_rollout_logprobs = true`."


def _estimators(estimators: Sequence[Any]) -> Iterator[str]:
    yield "## Estimator and reward\n"
    yield "An estimator that whitens needs `normalize_advantages = true`.\n"
    yield from _head(["`estimator.type`", *(f"`{name}`" for name in OF_ESTIMATOR), "compares a group", "whitens"])
    for estimator in estimators:
        fits = [*(allows(estimator, name) for name in OF_ESTIMATOR), estimator.compares, estimator.whitens]
        yield _row([f"`{type_of(estimator)}`", *map(_answer, fits)])


def _answer(fits: bool) -> str:
    return "yes" if fits else "no"


def _head(cells: Sequence[str]) -> Iterator[str]:
    yield _row(cells)
    yield "|" + "---|" * len(cells)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
