"""A generate function whose responses are programs: right or wrong, and longer ones take longer."""

import math
import random
from typing import Any

MAX_TOKENS = 30
TOKEN_S = 0.01  # seconds that a program sleeps, per token
RIGHT, WRONG = 2, 3  # by which a program multiplies; the label asks for the first
LABEL = '{"inputs": ["7"], "outputs": ["14"]}'


async def writes_a_program(conversation: Any) -> None:
    """One turn: a program in place of a model's text, with as many tokens as its length says."""

    async def service(_: list[int]) -> tuple[list[int], list[float], str]:
        length = random.randint(1, MAX_TOKENS)
        factor = random.choice((RIGHT, WRONG))
        conversation.sample_metadata["factor"] = factor
        text = f"import time\ntime.sleep({length * TOKEN_S:.2f})\nprint({factor} * int(input()))"
        return [6 + number % 10 for number in range(length)], [-math.log(16)] * length, text

    await conversation.generate_by(service)
