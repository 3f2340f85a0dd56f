"""The tables `run`, `bus`, `nodes` and `buffer`."""

from typing import Annotated, Literal

import msgspec

from runtime.settings.reading.access import Address, Harmless, Reads, Running, SecretFile, Writes
from runtime.settings.reading.config import Config
from runtime.settings.tables.values import Count, Name, Positive, Text, Timeout

_SERVER = r"(nats|tls|ws|wss)://[^@,]*"
BusUrl = Annotated[str, msgspec.Meta(pattern=f"^{_SERVER}(,{_SERVER})*$")]  # a login is cut out before
StillFor = Running[Annotated[float, msgspec.Meta(ge=5)]]  # seconds; heartbeats come twice a second
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class RunConfig(Config, frozen=True, kw_only=True):
    """The run's name, seed and directory."""

    harmless = True

    # Name of the run, of its directory, its NATS streams and its subjects.
    name: Name
    # Seed of randomly initialized weights, of the trainer's ranks, and of sampling.
    seed: Count = 1234
    # Directory that holds the run directories. This run's is `dir/name`.
    dir: Writes[Text] = "runs"
    # Directory for dumps of all samples, two files per train step. By default nothing is dumped.
    dump_details: Writes[Text | None] = None
    # Run only this half of the topology. "rollout" generates without training; "trainer" trains on the dump in `load`.
    only: Harmless[Literal["rollout", "trainer"] | None] = None
    # Dump to train on with `only = "trainer"`: a directory that `dump_details` of another run wrote.
    load: Reads[Text | None] = None
    # Seconds that one pre-start check may take, such as importing your grader. A slower check is stopped and reported.
    check_timeout_s: Running[Timeout] = 60.0
    # Seconds without any event before the event `run.stalled` says what each actor waits for.
    stall_after_s: Running[Annotated[float, msgspec.Meta(gt=0)]] = 300.0
    # Seconds without a heartbeat from an actor's event loop before the actor is killed and restarted.
    unresponsive_after_s: StillFor = 300.0


class BusConfig(Config, frozen=True, kw_only=True):
    """The bus: its NATS server and the limits of its streams. Unset limits are derived from the recipe."""

    # Node that runs the NATS server. Needed only with several nodes and without `url`.
    node: Name | None = None
    # URL of a NATS server that already runs, or URLs of the servers of one cluster, separated by commas. By default the
    # run starts its own server.
    url: Address[BusUrl | None] = None
    # File with the login for `url`: a user and password, a token, or a NATS credentials file (`.creds`) with a JWT and
    # a seed. Only its owner may be able to read it.
    credentials: SecretFile[Text | None] = None
    # Number of servers of the cluster at `url` that hold each stream. With 3, one of them may fail without loss, and
    # the run waits while two are away. A change takes effect at the next start.
    replicas: Harmless[Literal[1, 3]] = 1
    # Port of the server that the run starts. By default 4222 if other machines use the server, and otherwise a free
    # port that is chosen at each start.
    port: Address[Port | None] = None
    # Seconds without an answer of the run's own NATS server before it is killed and started again. It is back before
    # a publish gives up, which waits 30 s, so the run goes on. A value with which it would not be is refused.
    unresponsive_after_s: Harmless[Annotated[float, msgspec.Meta(ge=1)]] = 15.0
    # When the run's own NATS server syncs its store to the disk. "interval" does so every 10 s: a killed process or
    # server loses nothing, a power loss may lose what was stored in the last 10 s. "always" syncs each message before
    # it is confirmed, so that a power loss loses nothing that was confirmed. Publishing is then several times slower.
    sync: Harmless[Literal["interval", "always"]] = "interval"
    # Seconds for which a node that does not run the NATS server goes on without it: its processes stay, and its engines
    # keep their weights. After that the node ends with an error. A cluster without a majority of its servers counts as
    # away.
    outage_s: Timeout = 600.0
    # Size limit of the event stream in bytes. A limit below what the recipe can need is refused.
    event_bytes: Positive | None = None
    # Size limit of the work stream (tasks and score requests) in bytes. One below what the recipe can need is refused.
    work_bytes: Positive | None = None  # expert
    # Size limit of the data stream (sample payloads) in bytes. A limit below what the recipe can need is refused.
    data_bytes: Positive | None = None
    # Size limit of one message in bytes. A limit below what the recipe can need is refused.
    max_payload_bytes: Positive | None = None  # expert


class NodeConfig(Config, frozen=True, kw_only=True):
    """One machine: its GPUs and its address."""

    # Address at which this node's servers listen and other nodes reach them: an IP address, a DNS name, a network
    # interface, or "auto". "auto" is the address of the default route on the node with the bus, and of the route to the
    # bus on other nodes. By default "auto" with several nodes, and loopback with one. External clients need an address
    # that is not loopback; for graders of `reward.external` on the same machine, "127.0.0.1" will do.
    address: Address[Text | None] = None
    # Number of GPUs that the run may use here. They are numbered from 0.
    gpus: Count = 0
    # Seconds that this node waits at its start for the run's bus. After that it ends with an error. As long, the run
    # waits for this node if it cannot go on without it.
    wait_s: Timeout = 600.0


class BufferConfig(Config, frozen=True, kw_only=True):
    """The buffer actor. The recipe's `rollout` table decides what it issues."""

    # Minimum number of events to move from the log to the archive at a time. Fewer stay until the log is half full.
    trim_min_events: Positive = 10_000  # expert
