"""How families of models write conversations: which tokens end a turn, which roles they know, how they call tools."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from actors.rollout.sessions.tool_calls import Parser, deepseek, glm, harmony, hermes, llama


class ChatFamily(NamedTuple):
    """A way to write conversations as text.

    Attributes:
        name: for reports.
        marks: texts that a template of the family has, all of them.
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


FAMILIES: Final = (
    ChatFamily(
        "harmony",
        ("<|channel|>", "<|start|>"),
        ("<|end|>", "<|call|>", "<|return|>"),
        harmony,
        system_inside=False,
        thoughts_key="thinking",
        names_callers=True,
    ),
    ChatFamily("glm", ("[gMASK]", "<|observation|>"), (), glm, openers=("<|user|>", "<|observation|>", "<|system|>")),
    ChatFamily(
        "deepseek",
        ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        ("<｜end▁of▁sentence｜>",),
        deepseek,
        system_inside=False,
        arguments_as_text=True,
    ),
    ChatFamily("llama", ("<|start_header_id|>", "<|eot_id|>"), ("<|eot_id|>", "<|eom_id|>"), llama),
    ChatFamily("chatml", ("<|im_start|>", "<|im_end|>"), ("<|im_end|>",), hermes),
)
OTHER: Final = ChatFamily("other", (), (), hermes, system_inside=False)  # known by its template alone


def family_of(template: str) -> ChatFamily:
    """Return the family of a chat template; OTHER: none of those known here."""
    return next((family for family in FAMILIES if all(mark in template for mark in family.marks)), OTHER)
