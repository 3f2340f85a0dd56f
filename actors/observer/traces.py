"""Spans of prompt groups and train steps as traces: one of a group's whole life, one of a step. Pure.

The root of a trained group links to the root of the step that trained it.
"""

import msgspec

from runtime.report.fold.spans import Span

Value = str | int | float


class OtlpSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span. Its key names it in the run; the key of a trace's root names the trace."""

    root: str  # key of the root of its trace
    key: str
    parent: str = ""  # key; empty: it is the root
    name: str
    begin: float  # Unix time
    end: float
    attributes: dict[str, Value] = {}
    link: str = ""  # key of a root in another trace
    error: str = ""


def traced(span: Span) -> OtlpSpan | None:
    """Return a span for a trace; None: it is of no group and no step."""
    if span.kind == "group":
        return _group(span)
    if span.group >= 0:
        root = f"group/{span.group}"
        about = {"physarum.engine": span.row if span.kind == "rollout" else ""}
        about |= {"physarum.grader": span.row if span.kind == "scores" else ""}
        about |= {"physarum.outcome": span.facts.get("outcome", "")}
        attributes: dict[str, Value] = {"physarum.attempt": span.attempt, **{k: v for k, v in about.items() if v}}
        key = f"{root}/{span.attempt}/{span.kind}"
        return OtlpSpan(
            root=root, key=key, parent=root, name=span.kind, begin=span.begin, end=span.end, attributes=attributes
        )
    if span.kind not in ("step", "part") or not span.step:
        return None
    root = f"step/{span.step}"
    if span.kind == "part":
        key = f"{root}/{span.begin:.6f}"
        return OtlpSpan(root=root, key=key, parent=root, name=span.name, begin=span.begin, end=span.end)
    facts: dict[str, Value] = {f"physarum.{name}": value for name, value in span.facts.items()}
    attributes = {"physarum.step": span.step, **facts}
    return OtlpSpan(root=root, key=root, name="train step", begin=span.begin, end=span.end, attributes=attributes)


def _group(span: Span) -> OtlpSpan:
    """Return the root of a group."""
    facts = dict(span.facts)
    reason, is_linked = facts.pop("reason"), facts.pop("linked")
    about: dict[str, Value] = {
        "physarum.group": span.group,
        "physarum.attempts": span.attempt + 1,
        "physarum.outcome": span.name,
        **({"physarum.reason": reason} if reason else {}),
        **({"physarum.step": span.step} if span.step else {}),
        **{f"physarum.{name}": value for name, value in facts.items()},
    }
    return OtlpSpan(
        root=f"group/{span.group}",
        key=f"group/{span.group}",
        name="prompt group",
        begin=span.begin,
        end=span.end,
        attributes=about,
        link=f"step/{span.step}" if is_linked else "",
        error=reason or span.name if span.name == "failed" else "",
    )
