"""A curriculum by outcome: what it draws follows from the rewards of earlier groups alone."""

from collections.abc import Callable
from typing import Any


class Curriculum:
    """Draws items of a level; rises when most of a level is solved, and draws what was missed again."""

    def __init__(self) -> None:
        self.level = 0
        self.next_item = 0
        self.missed: list[int] = []
        self.drawn: dict[str, int] = {}  # item by number, of prompts without an outcome
        self.solved = 0

    def draw(self, number: int) -> dict[str, Any]:
        if self.missed:
            item = self.missed.pop(0)
        else:
            item, self.next_item = self.next_item, self.next_item + 1
        self.drawn[str(number)] = item
        return {"input": str(self.level + item % 3), "label": "1", "metadata": {"item": item, "level": self.level}}

    def told(self, outcome: Any) -> None:
        item = self.drawn.pop(str(outcome.number))
        if outcome.kind == "kept" and outcome.reward >= 0.5:
            self.solved += 1
            self.level = self.solved // 4
        else:
            self.missed = sorted({*self.missed, item})

    def state(self) -> Any:
        return {name: getattr(self, name) for name in ("level", "next_item", "missed", "drawn", "solved")}

    def restore(self, state: Any) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def reward_of(metadata: dict[str, Any]) -> float:
    """A reward that depends on the row alone: every third item is missed while its level is odd."""
    return 0.0 if metadata["item"] % 3 == 1 and metadata["level"] % 2 == 0 and metadata["item"] > 2 else 1.0


def grade(sample: Any) -> float:
    return reward_of(sample.metadata)


def expected(rounds: int, groups: int, reward: Callable[[dict[str, Any]], float] = reward_of) -> list[dict[str, Any]]:
    """The metadata of the rows in order, if each round's groups are kept before the next is drawn."""
    from runtime.ledger.state import GroupOutcome

    source, rows = Curriculum(), list[dict[str, Any]]()
    for index in range(rounds):
        numbers = range(index * groups, (index + 1) * groups)
        drawn = [source.draw(number)["metadata"] for number in numbers]
        for number, metadata in zip(numbers, drawn, strict=True):
            source.told(GroupOutcome(number=number, kind="kept", rewards=(reward(metadata),)))
        rows += drawn
    return rows
