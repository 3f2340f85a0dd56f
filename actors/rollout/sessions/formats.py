"""Formats of conversations: which tokens end a turn, which roles are known, how tools are called.

A model's format is that of its chat template, which models of one family need not share.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from actors.rollout.sessions.tool_calls import Parser, bare_json, harmony, marked_calls, tagged_arguments, tagged_json


class ChatFormat(NamedTuple):
    """A way to write conversations as text.

    Attributes:
        name: for reports.
        marks: texts that a template of the format has, all of them.
        ends: tokens that end a turn of the assistant where the template writes one. The first closes a turn that was
            cut off.
        openers: tokens that begin a message and that the model samples as the end of its turn.
        parse: reads a sampled turn.
        system_inside: whether the template writes a system message in its place, and not only at the beginning.
        thoughts_key: of a message's thoughts.
        arguments_as_text: whether the template takes the arguments of a call as JSON, not as values.
        names_callers: whether the answer of a tool is written with the name of the call before it.
    """

    name: str
    marks: tuple[str, ...]
    ends: tuple[str, ...]
    parse: Parser
    openers: tuple[str, ...] = ()
    system_inside: bool = True
    thoughts_key: str = "reasoning_content"
    arguments_as_text: bool = False
    names_callers: bool = False

    @property
    def stops(self) -> Iterator[str]:
        """All tokens after which a turn needs no end."""
        yield from (*self.ends, *self.openers)


FORMATS: Final = (
    ChatFormat(
        "harmony",
        ("<|channel|>", "<|start|>"),
        ("<|end|>", "<|call|>", "<|return|>"),
        harmony,
        system_inside=False,
        thoughts_key="thinking",
        names_callers=True,
    ),
    ChatFormat(
        "tagged_arguments",
        ("[gMASK]", "<|observation|>"),
        (),
        tagged_arguments,
        openers=("<|user|>", "<|observation|>", "<|system|>"),
    ),
    ChatFormat(
        "marked_calls",
        ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        ("<｜end▁of▁sentence｜>",),
        marked_calls,
        system_inside=False,
        arguments_as_text=True,
    ),
    ChatFormat("bare_json", ("<|start_header_id|>", "<|eot_id|>"), ("<|eot_id|>", "<|eom_id|>"), bare_json),
    ChatFormat("chatml", ("<|im_start|>", "<|im_end|>"), ("<|im_end|>",), tagged_json),
)
OTHER: Final = ChatFormat("other", (), (), tagged_json, system_inside=False)  # known by its template alone


def format_of(template: str) -> ChatFormat:
    """Return the format of a chat template; OTHER: none of those known here."""
    return next((each for each in FORMATS if all(mark in template for mark in each.marks)), OTHER)
