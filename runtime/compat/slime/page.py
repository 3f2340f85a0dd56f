"""Generates docs/reference/from-slime.md from slime's flags and a hand-written head and end."""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

import msgspec

from runtime.compat.slime.flags import OWN, Flag, FlagAnswer, FromSlime, Grader, Ours, Rule, Section, from_slime

LINK: Final = re.compile(r"\]\(([^):]+\))")  # of a remark: a page below docs/
FROM_HERE: Final = r"](../\1"

HEAD: Final = """# Coming from slime

Written by `bin/describe-settings` from `runtime/compat/slime/flags.toml`; do not edit.

slime has {count} command-line flags of its own and passes on those of Megatron, SGLang and its router. Here a run
is a TOML file: a *topology* (what runs where) that includes a *recipe* (what is trained). Any key can be set for
one start with `--set rollout.temperature=0.8`. An unknown key is refused with the closest existing one. If it is a
flag of slime, in any table and with dashes or underscores, the error has the answer of this page.

`bin/from-slime SCRIPT` makes both files of a start script in bash, which it reads and never runs. Each setting names
its flag, and so has each default of slime that differs from ours. The recipe ends with the flags that became no
setting, each with the reason. That way 26 of slime's 44 scripts lose nothing
([the list](../results/2026-11-28-slime-scripts.md)).
A flag is lost if the run trains or measures something else without it and no setting says the same, such as
`--freeze-params-name-list`, or a variable that turns quantization on. Then `bin/from-slime` writes nothing and exits
with 2. With `--force` the table `not_converted` of the recipe has a line for each, and `--check` refuses the recipe
until you delete them. The flags of miles for LoRA are converted too.

A recipe key that exists in slime keeps slime's name, without a prefix that the table's name has already:
`--rollout-temperature` is `rollout.temperature`.

The middle column of each table is our key. **not yet** means: fits the design and is not implemented; the last
column says what is missing, or what applies until then. **no** means: not planned, with the reason or an
alternative. Defaults are slime's; ours is named if it differs. **lost** marks the flags that `bin/from-slime` does not
leave out without `--force`, and **without it** says which key makes up for a flag that a script does not have.
"""

RULES_HEAD: Final = """
## Flags that slime passes on

Rules for all flags that no table above names.

| flags | here | |
|---|---|---|
"""

GRADERS_HEAD: Final = """
## Graders

The values of `--rm-type`; here of a data source's `rm_type`. The prefix `boxed_` grades the content of the last box.

| slime | here | |
|---|---|---|
"""

END: Final = """
## Sample fields

| slime | here |
|---|---|
| `group_index` | `group_id`: order of issue |
| `index`, `rollout_id` | `index` in its group, and `part` among fan-out siblings |
| `prompt`, `label`, `metadata` | the same |
| `tokens`, `response_length` | segments: `prompt_ids` and `response_ids`, one segment per turn or spill |
| `response` | the segments' `text` |
| `loss_mask`, `rollout_log_probs` | the same, per segment |
| `weight_versions` | `weight_spans`: the version of each token |
| `reward` | `reward`, and `score` with the grader's whole answer |
| `status` | the same five values |
| `teacher_log_probs` | a column, a data message of its own; with the teacher's likeliest tokens, if needed |
| `rollout_routed_experts` | `routed_experts` of its segments |
| `rollout_top_p_token_ids`, `rollout_top_p_token_offsets` | `kept_ids` and `kept_counts` of its segments |
"""


def from_slime_page() -> str:
    """Return the text of docs/reference/from-slime.md."""
    table = from_slime()
    sections, rules = map(_section, table.sections), map(_rule_row, table.rules)
    graders = map(_grader_row, table.graders)
    return "".join([_head(table), *sections, RULES_HEAD, *rules, GRADERS_HEAD, *graders, END])


def _head(table: FromSlime) -> str:
    return HEAD.format(count=sum(flag.origin == OWN for flag in table.flags()))


def _section(section: Section) -> str:
    rows = [*_flag_rows(section.flags), *map(_our_row, section.ours)]
    return f"\n## {section.title}\n\n| slime | here | |\n|---|---|---|\n{''.join(rows)}"


def _flag_rows(flags: Iterable[Flag]) -> Iterator[str]:
    """Yield one row per run of adjacent flags with the same answer."""
    for (here, remark), same in groupby(flags, key=lambda flag: (_here(flag), _remark(flag))):
        yield _row(", ".join(map(_name, same)), here, remark)


def _name(flag: Flag) -> str:
    default = f" = {flag.default}" if flag.default is not None else ""
    return f"`{flag.flag}`{default}{' (older)' if flag.origin == 'older' else ''}"


def _rule_row(rule: Rule) -> str:
    names = [*rule.names, *(f"{prefix}*" for prefix in rule.prefixes)]
    return _row(f"{rule.whose}: {', '.join(f'`{name}`' for name in names)}", _here(rule), _remark(rule))


def _remark(row: Flag | Rule) -> str:
    """Return the remark of a row, what is lost with its flag, and what makes up for an absent one."""
    lost = "**lost**" if row.loses else ""
    if row.loses and row.unless:
        lost = f"{lost} unless it is {' or '.join(f'`{value}`' for value in row.unless)}"
    keys = row.absent.items() if isinstance(row.absent, dict) else ()
    instead = ", ".join(f"`{key} = {msgspec.json.encode(value).decode()}`" for key, value in keys)
    return "; ".join(part for part in (row.remark, lost, f"**without it** {instead}" if instead else "") if part)


def _grader_row(grader: Grader) -> str:
    return _row(f"`{grader.name}`", _here(grader), grader.remark)


def _our_row(ours: Ours) -> str:
    return _row("(none)", f"`{ours.key}`", ours.note)


def _here(answer: FlagAnswer) -> str:
    return answer.state if answer.key is None else f"`{answer.key}`"


def _row(flags: str, here: str, remark: str) -> str:
    return f"| {flags} | {here} | {LINK.sub(FROM_HERE, remark)}{' ' if remark else ''}|\n"
