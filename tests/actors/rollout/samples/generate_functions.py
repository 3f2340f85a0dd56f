"""Generate functions as a user writes them, for the tests of conversations."""

import asyncio

import anyio
import anyio.lowlevel

from actors.rollout.samples.conversation import Conversation

RUNS: list[str] = []  # prompts of the runs that began
SCOPES: list[anyio.CancelScope] = []  # of turns that a test cancels


async def calculator(conversation: Conversation) -> None:
    """Three turns with tokens between them."""
    RUNS.append(conversation.prompt)
    for number in range(3):
        turn = await conversation.generate(stop=["."], max_new_tokens=300)
        conversation.sample_metadata["last"] = turn
        if number < 2:
            conversation.append_ids([60 + number, 61 + number])
    conversation.sample_metadata["label"] = conversation.label


async def calculator_with_another_prompt(conversation: Conversation) -> None:
    conversation.begin([50, 51, 52])
    await calculator(conversation)


async def grades_its_draft(conversation: Conversation) -> None:
    await conversation.generate()
    conversation.reward = 0.25 + await conversation.grade("a draft")


async def talks_once(conversation: Conversation) -> None:
    await conversation.generate()


async def returns_its_text(conversation: Conversation) -> str:
    return await conversation.generate()


async def chatters_without_end(conversation: Conversation) -> None:
    while True:
        await conversation.generate()
        conversation.append_ids([60])


async def raises(conversation: Conversation) -> None:
    await conversation.generate()
    raise KeyError("no such tool")


async def exits(conversation: Conversation) -> None:
    await conversation.generate()
    raise SystemExit(3)


async def awaits_what_was_cancelled(conversation: Conversation) -> None:
    await conversation.generate()
    task = asyncio.create_task(anyio.sleep_forever())
    await anyio.lowlevel.checkpoint()
    task.cancel()
    await task


async def hangs(conversation: Conversation) -> None:
    await conversation.generate()
    await anyio.sleep_forever()


async def talks_twice_in_a_row(conversation: Conversation) -> None:
    await conversation.generate()
    await conversation.generate()


async def never_asks(conversation: Conversation) -> None:
    """Ends at once."""


async def asks_for_nothing(conversation: Conversation) -> None:
    await conversation.generate(max_new_tokens=0)


async def stops_at_letters(conversation: Conversation) -> None:
    await conversation.generate(stop="</add>")


async def stops_at_nothing(conversation: Conversation) -> None:
    await conversation.generate(stop=["."])
    conversation.append(" ")
    await conversation.generate(stop=["", "."])


async def appends_a_number(conversation: Conversation) -> None:
    await conversation.generate()
    conversation.append(5)  # type: ignore[arg-type]


async def talks_twice_at_once(conversation: Conversation) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(conversation.generate)
        group.start_soon(conversation.generate)


async def leaves_a_turn(conversation: Conversation) -> None:
    with anyio.move_on_after(0):
        await conversation.generate()


async def appends_letters_as_ids(conversation: Conversation) -> None:
    await conversation.generate()
    conversation.append_ids("ab")  # type: ignore[arg-type]


async def appends_what_is_no_token(conversation: Conversation) -> None:
    await conversation.generate()
    conversation.append_ids([60, 1_000_000])


def plain(conversation: Conversation) -> None:
    """Not async."""


async def notes_what_no_message_can_carry(conversation: Conversation) -> None:
    await conversation.generate()
    conversation.sample_metadata["tools"] = object()


async def uses_a_tool(conversation: Conversation) -> None:
    """Two turns with a tool's answer between them."""
    await conversation.generate()
    conversation.append_ids([60])
    conversation.text += " (sixty) "
    await conversation.generate()


async def notes_too_much(conversation: Conversation) -> None:
    await conversation.generate()
    conversation.sample_metadata["trace"] = "x" * 9_000_000


async def decides_alone(conversation: Conversation) -> None:
    """Three turns, of which the second and a part of the third do not train, and a reward of its own."""
    await conversation.generate()
    conversation.append_ids([60])
    await conversation.generate(train=False)
    conversation.append_ids([61])
    await conversation.generate()
    conversation.do_not_train(2, 1, 3)
    conversation.reward = 0.25
    conversation.end("truncated")


async def fails_first(conversation: Conversation) -> None:
    RUNS.append(conversation.prompt)
    if len(RUNS) == 1:
        conversation.end("failed", "no such page")
        return
    await conversation.generate()


async def always_fails(conversation: Conversation) -> None:
    conversation.end("failed", "no such page")


async def aborts(conversation: Conversation) -> None:
    RUNS.append(conversation.prompt)
    await conversation.generate()
    conversation.append_ids([60])
    await conversation.generate()
    conversation.end("aborted", "the shop is closed")


async def changes_its_mind(conversation: Conversation) -> None:
    """A tool that answers differently each time."""
    RUNS.append(conversation.prompt)
    for _ in range(2):
        await conversation.generate()
        conversation.append_ids([60 + len(RUNS)])
    await conversation.generate()


async def promises_too_much(conversation: Conversation) -> None:
    await changes_its_mind(conversation)


promises_too_much.deterministic = True  # type: ignore[attr-defined]


async def delegates(conversation: Conversation) -> None:
    """Two further conversations: one with a prompt of its own and a reward, one that goes on from the first turn."""
    RUNS.append(conversation.prompt)
    await conversation.generate()
    helper = conversation.open([20, 21])
    helper.sample_metadata["role"] = "helper"
    helper.reward = 0.5
    await helper.generate()
    rest = conversation.open(conversation.prompt_ids[:1], conversation.turns[0].ids[2:])
    await rest.generate()
    conversation.append_ids(helper.turns[0].ids[:1])
    await conversation.generate()


async def asks_a_service(conversation: Conversation) -> None:
    RUNS.append(conversation.prompt)

    async def service(ids: list[int]) -> tuple[list[int], list[float], str]:
        RUNS.append(f"service {ids}")
        return [30, 31], [-0.5, -0.25], "ab"

    await conversation.generate_by(service)
    conversation.append_ids([60])
    await conversation.generate()


async def asks_a_service_in_between(conversation: Conversation) -> None:
    async def service(ids: list[int]) -> tuple[list[int], None]:
        RUNS.append(f"service {ids}")
        return [30, 31], None

    await conversation.generate()
    conversation.append_ids([60])
    await conversation.generate_by(service, train=False)
    conversation.append_ids([61])
    await conversation.generate()


async def tries_a_turn_twice(conversation: Conversation) -> None:
    with anyio.CancelScope() as scope:
        SCOPES.append(scope)
        await conversation.generate()
    await conversation.generate()


async def asks_a_service_without_log_probs(conversation: Conversation) -> None:
    async def service(ids: list[int]) -> tuple[list[int], None]:
        return [30], None

    await conversation.generate_by(service)


async def plans_greedily(conversation: Conversation) -> None:
    """A greedy turn, then one at 0.5. The second run wants the recipe's temperature for the first turn."""
    RUNS.append(conversation.prompt)
    await conversation.generate(temperature=0.0 if len(RUNS) != 2 else None)
    conversation.append_ids([60])
    await conversation.generate(temperature=0.5)


async def rewards_its_turns(conversation: Conversation) -> None:
    """Three turns; the second one has no reward of its own."""
    for number in range(3):
        if number:
            conversation.append_ids([60])
        await conversation.generate(stop=["."])
    conversation.turn_rewards = [0.5, None, 0.25]


async def rewards_more_turns_than_it_has(conversation: Conversation) -> None:
    """One turn."""
    await conversation.generate()
    conversation.turn_rewards = [0.5, 0.25]
