"""The phases in order, what is done when somebody dies, and that nobody ever holds what another needs."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.turns.stages import SENDS, STAGE_OF, Stage
from actors.trainer.phases.states import (
    CALLED,
    ORDER,
    REMEDIES,
    TRAINS,
    Remedy,
    Victim,
    first_phase,
    must_all_answer,
    next_phase,
)
from messages import Phase, PhaseChanged
from runtime.ledger.phases import Turn, next_turn

GENERATE, RELEASE, TRAIN, OFFLOAD = Phase.GENERATE, Phase.RELEASE, Phase.TRAIN, Phase.OFFLOAD


def test_the_order_of_the_phases() -> None:
    assert [next_phase(phase) for phase in ORDER] == [*ORDER[1:], GENERATE]
    assert [phase.value for phase in ORDER] == [
        "generate",
        "release",
        "train",
        "offload",
        "resume_weights",
        "update",
        "resume_kv",
    ]


def test_what_engines_may_have_in_each_phase() -> None:
    assert [STAGE_OF[phase].name for phase in ORDER] == [
        "EVERYTHING",
        "NOTHING",
        "NOTHING",
        "NOTHING",
        "WEIGHTS",
        "LOADED",
        "EVERYTHING",
    ]
    assert all(STAGE_OF[phase] is Stage.NOTHING for phase in TRAINS)
    assert all(STAGE_OF[phase] is Stage.EVERYTHING for phase in SENDS)


def test_what_is_done_when_somebody_dies() -> None:
    assert {phase for phases in REMEDIES.values() for phase in phases} == set(Phase)
    assert set(REMEDIES) == set(Victim)
    assert set(REMEDIES[Victim.TRAINER].values()) == {Remedy.BEGINS_WITH_RELEASE}
    assert {p for p, remedy in REMEDIES[Victim.ROLLOUT].items() if remedy is Remedy.IS_ASKED_AGAIN} == CALLED
    engine = REMEDIES[Victim.ENGINE]
    assert [engine[phase] for phase in (GENERATE, RELEASE, TRAIN)] == [
        Remedy.COMES_BACK,
        Remedy.IS_AWAITED,
        Remedy.GIVES_BACK,
    ]
    for phase, remedy in engine.items():  # one that is up again gives back exactly where engines may have nothing
        assert (remedy in (Remedy.IS_AWAITED, Remedy.GIVES_BACK)) == (STAGE_OF[phase] is Stage.NOTHING)
        assert (remedy is Remedy.IS_AWAITED) == must_all_answer(phase)


def changed(phase: Phase, incarnation: int) -> PhaseChanged:
    return PhaseChanged(phase=phase, step=0, incarnation=incarnation)


def test_a_trainer_that_was_replaced_changes_no_phase() -> None:
    turn = next_turn(None, changed(TRAIN, 1), 5)
    turn = next_turn(turn, changed(RELEASE, 2), 6)
    assert next_turn(turn, changed(GENERATE, 1), 7) is turn
    assert next_turn(turn, changed(TRAIN, 2), 8) == Turn(phase=TRAIN, incarnation=2, step=0, seq=8)


@dataclass
class World:
    """Trainer, rollout actor and two engines as a model: who has what, and what the log says."""

    log: Turn | None = None
    seq: int = 0
    incarnation: int = 0
    trainer: Phase | None = None  # the phase that the living trainer leads; None: it is down
    trains: bool = False  # it has what training needs
    followed: Turn | None = None  # by the rollout actor; None: it is down, or has not read yet
    engines: dict[int, Stage | None] = field(default_factory=lambda: dict.fromkeys((0, 1)))  # None: down
    fresh: set[int] = field(default_factory=set[int])  # up, with what their start took, not told anything yet

    def publish(self, phase: Phase) -> None:
        self.seq += 1
        self.log = next_turn(self.log, changed(phase, self.incarnation), self.seq)
        self.trainer = phase

    def start_trainer(self) -> None:
        if self.trainer is None:
            self.incarnation += 1
            self.publish(first_phase(is_first_start=self.log is None))

    def lead(self) -> None:
        """The trainer goes on, if those that it waits for are there."""
        if self.trainer is None or not self.is_reached(self.trainer):
            return
        if self.trainer is TRAIN:
            self.trains = True
        elif self.trainer is OFFLOAD:
            self.trains = False
        self.publish(next_phase(self.trainer))
        if self.trainer is TRAIN:
            self.trains = True

    def is_reached(self, phase: Phase) -> bool:
        if phase not in CALLED:
            return True
        if self.followed is None or self.followed != self.log:
            return not must_all_answer(phase)  # only that one is waited for without end
        wanted = STAGE_OF[phase]
        if must_all_answer(phase):
            return all(held is Stage.NOTHING for held in self.engines.values())
        return all(held is None or held >= wanted for held in self.engines.values())

    def follow(self) -> None:
        """The rollout actor reads the log, and brings one step further who is up."""
        self.followed = self.log
        if self.followed is None:
            return
        for engine, held in self.engines.items():
            if held is not None:
                self.engines[engine] = STAGE_OF[self.followed.phase]
                self.fresh.discard(engine)

    def die(self, victim: Victim, engine: int) -> None:
        match victim:
            case Victim.TRAINER:
                self.trainer, self.trains = None, False
            case Victim.ROLLOUT:
                self.followed = None
            case Victim.ENGINE:
                self.engines[engine] = None
                self.fresh.discard(engine)

    def start_engine(self, engine: int) -> None:
        if self.engines[engine] is None:
            self.engines[engine] = Stage.EVERYTHING
            self.fresh.add(engine)

    def check(self) -> None:
        """Only what an engine's own start has just taken may be beside what the trainer trains with."""
        if self.trains:
            assert all(held in (None, Stage.NOTHING) or engine in self.fresh for engine, held in self.engines.items())


MOVES = st.one_of(
    st.sampled_from(["lead", "follow", "start trainer"]),
    st.tuples(st.sampled_from(list(Victim)), st.integers(0, 1)),
    st.tuples(st.just("start engine"), st.integers(0, 1)),
)


@given(st.lists(MOVES, max_size=60))
def test_whoever_dies_in_whichever_phase_nobody_holds_what_another_needs_and_all_come_back(moves: list[object]) -> None:
    world = World()
    for move in moves:
        match move:
            case "lead":
                world.lead()
            case "follow":
                world.follow()
            case "start trainer":
                world.start_trainer()
            case (Victim() as victim, int(engine)):
                world.die(victim, engine)
            case (_, int(engine)):
                world.start_engine(engine)
            case _:
                raise AssertionError(move)
        world.check()
    for _ in range(2 * len(ORDER)):  # now nobody dies any more, and all that died are started again
        world.start_trainer()
        for engine in world.engines:
            world.start_engine(engine)
        world.follow()
        if world.trainer is GENERATE:
            break
        world.lead()
        world.check()
    assert world.trainer is GENERATE
    assert set(world.engines.values()) == {Stage.EVERYTHING}
