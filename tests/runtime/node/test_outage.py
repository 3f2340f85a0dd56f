"""What a node does while its bus does not answer."""

import pytest

from runtime.node.outage import Outage, explains_silence


def test_an_outage_is_shown_when_it_begins_each_minute_and_when_it_ends() -> None:
    outage = Outage("tls://h:4222", 600.0)
    assert outage.look(0.0).line is None
    assert outage.look(0.4).line == (
        "the bus at tls://h:4222 does not answer; this node goes on without it for up to 600 s (bus.outage_s)"
    )
    assert outage.look(0.9).line is None
    assert outage.look(60.5).line == "the bus has not answered for 60 s of 600 s (bus.outage_s)"
    assert outage.look(61.0).line is None
    assert outage.look(0.0).line == "the bus answers again, after 61 s"
    assert outage.look(0.0).line is None


def test_an_outage_that_follows_at_once_is_another_one() -> None:
    outage = Outage("tls://h:4222", 10.0)
    outage.look(9.0)
    assert outage.look(0.1).line == "the bus answers again, after 9 s, and was lost again"
    assert outage.look(9.5).failure is None


@pytest.mark.parametrize("away_s", [600.0, 700.0])
def test_a_node_ends_after_the_seconds_allowed(away_s: float) -> None:
    outage = Outage("tls://h:4222", 600.0)
    assert outage.look(599.9).failure is None
    assert outage.look(away_s).failure == "tls://h:4222 did not answer for 600 s (bus.outage_s)"


def test_an_outage_explains_silence_for_a_minute_after_it() -> None:
    """After a cut of the network the rollout actor had an engine killed, and its weights were gone."""
    assert explains_silence(5.0)
    assert not explains_silence(61.0)
    assert not explains_silence(float("inf"))  # there was none
