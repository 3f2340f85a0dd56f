"""The phases in order, and which incarnation of the trainer may change them."""

from actors.trainer.phases.states import ORDER, next_phase
from messages import Phase, PhaseChanged
from runtime.ledger.phases import CurrentPhase, fold_phase

GENERATE, RELEASE, TRAIN = Phase.GENERATE, Phase.RELEASE, Phase.TRAIN


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


def changed(phase: Phase, incarnation: int) -> PhaseChanged:
    return PhaseChanged(phase=phase, step=0, incarnation=incarnation)


def test_a_trainer_that_was_replaced_changes_no_phase() -> None:
    turn = fold_phase(None, changed(TRAIN, 1), 5)
    turn = fold_phase(turn, changed(RELEASE, 2), 6)
    assert fold_phase(turn, changed(GENERATE, 1), 7) is turn
    assert fold_phase(turn, changed(TRAIN, 2), 8) == CurrentPhase(phase=TRAIN, incarnation=2, step=0, seq=8)
