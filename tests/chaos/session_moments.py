"""Kill points of a weight sync or of a delta in files, at which a participant kills or stops itself once.

The step of a kill point is the version being transferred. For a trainer in a weight sync it is the last trained step.
"""

from collections.abc import Callable
from typing import Any, Final

from tests.chaos import rank_moments
from tests.chaos.rank_moments import around, striker


class _Now:
    """Current position of this process in a weight sync."""

    step = -1  # of the trainer
    bucket = -1
    version = -1  # of the engine
    num_sessions = 0  # number of weight syncs of the engine, where it does not know the version


def install_trainer() -> None:
    """Kill points: around each bucket, before engines get the end of the sync, after a version's files are complete."""
    from actors.trainer.models.publish import Versions
    from actors.trainer.sending.leading import WeightSessions
    from actors.trainer.sending.rank import RankSender
    from actors.trainer.sending.sink import BucketSink, NullSink
    from actors.trainer.step.train_step import TrainStep
    from messages import WeightSyncFinished

    strike = striker()
    rank_moments.install(strike)
    around(TrainStep, "__call__", before=lambda _, batch: setattr(_Now, "step", batch.step))
    around(RankSender, "_sink", before=lambda *_: setattr(_Now, "bucket", -1))

    def begin(*_args: Any, **_options: Any) -> None:
        _Now.bucket += 1
        strike(f"before bucket {_Now.bucket}", _Now.step)

    around(Versions, "complete", after=lambda published: strike("published", int(published.path.name[1:])))
    around(BucketSink, "_send", before=begin, after=lambda _: strike(f"after bucket {_Now.bucket}", _Now.step))
    around(NullSink, "hand_over", before=begin)
    around(
        WeightSessions,
        "_all_do",
        before=lambda _self, _outcome, step, **_: (
            strike("before the end", _Now.step) if isinstance(step, WeightSyncFinished) else None
        ),
    )


def install_engine() -> None:
    """Kill points of an engine: before it begins a sync, before it takes a bucket, before it ends the sync."""
    from actors.tiny_engine.engine.updating import Updating
    from actors.tiny_engine.http.sessions import SessionEndpoints

    strike = striker()

    def begin(endpoints: SessionEndpoints, *_: Any) -> None:
        _Now.version, _Now.bucket = int(endpoints._frontend.version.partition("@")[0]), -1
        strike("before begin", _Now.version)

    def take(*_args: Any, **_options: Any) -> None:
        _Now.bucket += 1
        strike(f"in bucket {_Now.bucket}", _Now.version)

    around(SessionEndpoints, "begin", before=begin)
    around(Updating, "receive", before=take)
    around(SessionEndpoints, "end", before=lambda *_: strike("before end", _Now.version))


def install_sglang() -> None:
    """The same kill points in the scheduler of SGLang's server, which holds the model. The step counts the syncs."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    strike = striker()

    def begin(*_: Any) -> None:
        _Now.num_sessions, _Now.bucket = _Now.num_sessions + 1, -1
        strike("before begin", _Now.num_sessions)

    def take(*_: Any) -> None:
        _Now.bucket += 1
        strike(f"in bucket {_Now.bucket}", _Now.num_sessions)

    around(SchedulerWeightUpdaterManager, "begin_weight_update", before=begin)
    around(SchedulerWeightUpdaterManager, "update_weights_from_distributed", before=take)
    around(SchedulerWeightUpdaterManager, "update_weights_from_tensor", before=take)
    around(
        SchedulerWeightUpdaterManager,
        "end_weight_update",
        before=lambda *_: strike("before end", _Now.num_sessions),
    )


def install_rollout() -> None:
    """Kill points of a rollout actor: before an engine's sync begins, and before the call that announces a bucket."""
    from actors.rollout.engines.weights.receiving import Receiver
    from messages import BucketSent

    strike = striker()
    around(Receiver, "receive", before=lambda _self, _url, part, _label: strike("prepared", part.version))
    around(
        Receiver,
        "_take",
        before=lambda _self, _url, part, step: (
            strike(f"told of bucket {step.index}", part.version) if isinstance(step, BucketSent) else None
        ),
    )


def install_agent() -> None:
    """Kill point of a node daemon: while it applies a delta to the node's own copy."""
    from runtime.models import delta

    strike = striker()
    around(delta, "_write_file", before=lambda _file, _path, chain: strike("applying", chain[-1].delta.target.number))


INSTALLS: Final[dict[str, Callable[[], None]]] = {  # by the module whose import moments/sitecustomize.py waits for
    "actors.trainer.commands": install_trainer,
    "actors.tiny_engine.http.sessions": install_engine,
    "sglang.srt.managers.scheduler_components.weight_updater": install_sglang,
    "actors.rollout.engines.weights.receiving": install_rollout,
    "runtime.node.copying": install_agent,
}
