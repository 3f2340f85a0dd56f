"""Generate functions that fail in some of their samples, as a user writes them."""

import asyncio

from actors.rollout.samples.conversation import Conversation


async def raises_in_the_first(conversation: Conversation) -> None:
    await conversation.generate()
    if conversation.index == 0:
        raise KeyError("no such tool")


async def raises_in_the_first_at_once(conversation: Conversation) -> None:
    if conversation.index == 0:
        raise KeyError("no such tool")
    await conversation.generate()


async def raises_in_the_first_two(conversation: Conversation) -> None:
    await conversation.generate()
    if conversation.index < 2:
        raise ConnectionError("the tool's server is away")


async def hangs_in_the_first(conversation: Conversation) -> None:
    await conversation.generate()
    if conversation.index == 0:
        await the_tool()


async def the_tool() -> None:
    await asyncio.sleep(600)


async def passes_it_on(conversation: Conversation) -> None:
    """Wrap an error that the product raised in another one."""
    try:
        await conversation.generate()
    except Exception as error:
        raise RuntimeError("my agent failed") from error


async def passes_it_on_in_a_group(conversation: Conversation) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(conversation.generate())


async def raises_always(conversation: Conversation) -> None:
    await conversation.generate()
    raise KeyError("no such tool")


async def hangs_always(conversation: Conversation) -> None:
    await conversation.generate()
    await the_tool()


SEEN: list[int] = []  # samples, in the order of the calls


async def hangs_after_a_good_one(conversation: Conversation) -> None:
    SEEN.append(conversation.index)
    is_first = len(SEEN) == 1
    await conversation.generate()
    if not is_first:
        await the_tool()
