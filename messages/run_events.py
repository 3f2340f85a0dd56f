"""The event plane: what becomes of a run's processes, its nodes, and messages that no process could read."""

from messages.base import Message, Plane, register


@register
class ActorStarted(Message, kw_only=True, tag="actor_started"):
    """A process of the run was started. Written by the node daemon."""

    plane = Plane.EVENT
    topic = "actor.started"
    actor: str
    node: str
    pid: int
    restarts: int = 0


@register
class ActorExited(Message, kw_only=True, tag="actor_exited"):
    """A process of the run ended. Written by the node daemon."""

    plane = Plane.EVENT
    topic = "actor.exited"
    actor: str
    node: str
    pid: int
    exit_code: int  # negative: killed by that signal
    reason: str
    restart_in_s: float | None = None  # None: no restart


@register
class EventLoopBlocked(Message, kw_only=True, tag="event_loop_blocked"):
    """A call blocked the event loop of a process, so that the process did nothing else. Written by the node daemon.

    Published once a block has lasted some seconds, and at the end of each that took a second or more.
    """

    plane = Plane.EVENT
    topic = "event_loop.blocked"
    actor: str
    node: str
    pid: int
    blocked_s: float  # so far, without time in which the process was stopped or had no core
    ended: bool
    function: str = ""  # setting that names the user's function; empty: none, or unknown
    place: str = ""  # file, line and name of the call; empty: unknown
    is_ours: bool = False  # the call is in code of this project


@register
class RunStalled(Message, kw_only=True, tag="run_stalled"):
    """No event was logged for a long time. Lists what each actor waits for. Written by the node daemon."""

    plane = Plane.EVENT
    topic = "run.stalled"
    idle_s: float  # since the last event
    waiting: dict[str, str]  # by instance; for an instance that does not answer, says so


@register
class RunStopped(Message, kw_only=True, tag="run_stopped"):
    """The run stops on all nodes before its last step; the same command resumes it. Written by the node daemon.

    The home node writes it when a signal or an error stops it, and any node that gives a process up.
    """

    plane = Plane.EVENT
    topic = "run.stopped"
    node: str  # that stops the run
    reason: str
    exit_code: int  # of the command on every node


@register
class NodeLeft(Message, kw_only=True, tag="node_left"):
    """A node stopped its processes, and the run goes on without it. Written by the node daemon.

    Its workers give their open tasks back while they stop, so others take them up at once.
    """

    plane = Plane.EVENT
    topic = "node.left"
    node: str
    reason: str


@register
class ScoreRequestsLost(Message, kw_only=True, tag="score_requests_lost"):
    """Workers of a grader acknowledged score requests without an answer. Published ever less often by rollout."""

    plane = Plane.EVENT
    topic = "score_requests.lost"
    instance: str
    grader: str
    num_lost: int  # since the start of this instance
    credentials: tuple[str, ...] = ()  # names of external clients that may grade for it


@register
class MessageDeadLettered(Message, kw_only=True, tag="message_dead_lettered"):
    """A message could not be used and was dead-lettered. Written by its reader.

    If the subject is of a task (`work.rollout.<group_id>.<attempt>`) of an attempt in flight, its group has failed with
    the reason "task: " and `reason`. If it is of an end (`event.group.completed`, `aborted` or `failed` with the same
    key), it counts while that attempt is in flight, and the third that counts, over all attempts of the group, does
    the same, with "ending: ".
    """

    plane = Plane.EVENT
    topic = "message.dead_lettered"
    keyed = True
    origin: str = ""  # where it was stored, as in its DeadLetter; one event per origin
    subject: str
    reason: str
    dead_seq: int  # in the dead-letter stream

    def key(self) -> str:
        return self.origin


@register
class DeadLetter(Message, kw_only=True, tag="dead_letter"):
    """A dead-lettered message, unchanged."""

    plane = Plane.DEAD
    topic = "letter"
    keyed = True
    origin: str  # where it was stored: plane and stream sequence, "event.17"; one letter per origin
    subject: str
    reason: str
    headers: dict[str, str]
    payload: bytes  # base64 in JSON

    def key(self) -> str:
        return self.origin
