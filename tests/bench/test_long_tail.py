"""The simulation that the long-tail benchmark compares with, by hand; and the clock engine, which takes its time."""

import pytest

from tests.bench.long_tail import Clock, Lengths, Mode, Simulation, Work, tokens_per_s


class Given(Lengths):
    """Lengths by prompt, one sample each."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(mean=1, sigma=1, cap=1)
        object.__setattr__(self, "lengths", lengths)

    def of(self, prompt: int, index: int) -> int:
        return self.lengths[prompt]


def ends(mode: Mode, lengths: Lengths, *, steps: int, slots: int = 4, groups: int = 2, train_s: float = 0.5) -> list:
    """When the train steps end, and their tokens, on a clock of one second a token step."""
    simulation = Simulation(Work(steps, groups, 1, train_s), mode, Clock(1.0, 0.0, slots), lengths)
    return [(step.ended_s, step.num_tokens) for step in simulation.run()]


def test_a_synchronous_step_takes_its_longest_response_and_its_training() -> None:
    assert ends(Mode(1), Given(3, 7, 2, 4), steps=2) == [(7.5, 10), (12.0, 6)]


def test_dropped_responses_are_generated_for_nothing() -> None:
    # 3 and 2 are first, then 1 and 4 of the next four
    assert ends(Mode(2, "drop"), Given(3, 7, 2, 9, 1, 6, 4, 8), steps=2) == [(3.5, 5), (8.0, 5)]


def test_resumed_responses_go_on_from_their_tokens_before_new_ones() -> None:
    # after 3 token steps 7 and 9 have 4 and 6 to go; with 5 and 8 new ones the first two end at 4 and 5 more
    assert ends(Mode(2), Given(3, 7, 2, 9, 5, 8), steps=2) == [(3.5, 5), (9.0, 12)]


def test_the_longest_responses_wait_where_slots_are_few() -> None:
    assert ends(Mode(1), Given(3, 7), steps=1, slots=1) == [(10.5, 10)]


def test_one_step_of_staleness_hides_the_training_behind_the_next_rollout() -> None:
    assert ends(Mode(1, max_staleness=1), Given(3, 7, 2, 4, 1, 5), steps=3) == [(7.5, 10), (11.5, 6), (16.5, 6)]


def test_steps_that_train_longer_than_they_generate_are_the_trainers() -> None:
    taken = ends(Mode(1, max_staleness=1), Given(1, 1, 1, 1, 1, 1), steps=3, train_s=5.0)
    assert taken == [(6.0, 2), (11.0, 2), (16.0, 2)]


def test_a_token_step_takes_longer_the_more_samples_run() -> None:
    run = Simulation(Work(1, 2, 1, 0.0), Mode(1), Clock(1.0, 0.5, 4), Given(1, 2)).run()
    assert [step.ended_s for step in run] == [2.0 + 1.5]


def test_useful_tokens_are_counted_from_the_end_of_the_warm_up() -> None:
    run = Simulation(Work(2, 2, 1, 0.5), Mode(1), Clock(1.0, 0.0, 4), Given(3, 7, 2, 4)).run()
    assert tokens_per_s(run, 1) == pytest.approx(6 / 4.5)
    assert tokens_per_s(run, 0) == pytest.approx(16 / 12.0)


def test_a_sample_has_the_same_length_in_every_run() -> None:
    lengths = Lengths(mean=48, sigma=1.0, cap=384)
    drawn = [lengths.of(prompt, index) for prompt in range(500) for index in range(4)]
    assert drawn == [Lengths(mean=48, sigma=1.0, cap=384).of(p, i) for p in range(500) for i in range(4)]
    assert 1 <= min(drawn) < 10
    assert max(drawn) == 384
    assert sum(drawn) / len(drawn) == pytest.approx(46, rel=0.1)
