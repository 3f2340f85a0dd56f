"""Generates docs/reference/combinations.md from the one declaration of what combines in [algorithm]."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, get_args

from runtime.settings.rules.algorithm import APPLIES, REFUSALS, refusal
from runtime.settings.tables.algorithm import Estimator, LossMode

HEAD: Final = """# What combines

Written by `bin/describe-settings` from `runtime/settings/rules/algorithm.py`; do not edit.

`--check` refuses what this page does not allow, with the reason. A test computes every allowed pair of estimator and
loss, and shows that every other pair is refused. All settings are in `[algorithm]`.
"""
CORRECTIONS: Final = ("use_tis", "use_rs", "use_opsm")


def combinations_page() -> str:
    """Return the text of docs/reference/combinations.md."""
    return "\n".join([HEAD, *_pairs(), "", *_corrections(), "", *_settings(), ""])


def _pairs() -> Iterator[str]:
    yield "## Estimator and loss\n"
    yield "`advantage_estimator` in rows, `loss_mode` in columns. A number is the reason below the table.\n"
    losses: Sequence[LossMode] = get_args(LossMode)
    estimators: Sequence[Estimator] = get_args(Estimator)
    reasons = list(dict.fromkeys(item.reason for item in REFUSALS))
    yield from _head(["", *losses])
    for estimator in estimators:
        found = [refusal(estimator, loss) for loss in losses]
        yield _row([f"`{estimator}`", *(str(reasons.index(reason) + 1) if reason else "yes" for reason in found)])
    yield ""
    for number, reason in enumerate(reasons, 1):
        yield f"{number}. It {reason}."


def _corrections() -> Iterator[str]:
    yield "## Loss and correction\n"
    yield "`loss_mode` in rows. Losses with no correction compare with the engine themselves.\n"
    yield from _head(["", *CORRECTIONS])
    for loss in get_args(LossMode):
        yield _row([f"`{loss}`", *("yes" if loss in APPLIES[name].choices else "no" for name in CORRECTIONS)])
    yield ""
    yield "- `use_tis` and `use_rs` need old log-probs of the trainer: not with `use_rollout_logprobs`, unless"
    yield "  `bypass_mode = true`."
    yield '- `bypass_mode` with `use_tis`: `loss_mode = "gpg"` alone. Other losses would count a ratio twice.'
    yield "- `bypass_mode` with `use_rs` alone: `gpg`, or any loss above with `use_rollout_logprobs = true`."


def _settings() -> Iterator[str]:
    yield "## Settings that need a choice\n"
    yield "A setting that is changed without its choice has no effect, and is refused.\n"
    yield from _head(["setting", "needs"])
    for name, applies in APPLIES.items():
        if name in CORRECTIONS:
            continue
        choices = "`true`" if applies.choices == (True,) else ", ".join(f"`{choice}`" for choice in applies.choices)
        yield _row([f"`{name}`", f"`{applies.key}`: {choices}"])


def _head(cells: Sequence[str]) -> Iterator[str]:
    yield _row(f"`{cell}`" if cell in get_args(LossMode) or cell in CORRECTIONS else cell for cell in cells)
    yield "|" + "---|" * len(cells)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
