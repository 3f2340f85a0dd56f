"""Accounts of a run's server: one table of what external clients may touch, and the configuration that it makes.

Node daemons and actors use the account RUN, which alone has streams. External clients use accounts without streams
that import exactly their subjects. The server answers a request into the account of its client, so a reply subject
leads to no stream, key or inbox of the run, although the server checks no permission for it. A reply subject can lead
to an import of the client's own account, so each grader has its own: workers of one cannot pull tasks of another.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from messages import Plane
from messages.subjects import (
    grader_token,
    inbox_prefix,
    plane_filter,
    prompt_filter,
    score_durable,
    scores_filter,
    stream_of,
)
from runtime.bus.credential import Credential, Instant
from runtime.bus.nats.certificate import NAME
from runtime.util.secrets import Login

RUN_ACCOUNT: Final = "RUN"
VIEWERS: Final = "VIEWERS"
AUDITORS: Final = "AUDITORS"
NODE_USER: Final = "physarum"  # of node daemons and actors
MAX_CONNECTIONS: Final = 4096  # of all clients of an external account together


class ClientKind(StrEnum):
    """Kinds of external clients."""

    GRADER = "grader"  # answers the score requests of one grader
    VIEWER = "viewer"  # reads the events
    AUDITOR = "auditor"  # reads the data plane: prompts and samples with their tokens


class ExternalClient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One external client. Its name is its user name."""

    name: str
    kind: ClientKind
    grader: str = ""  # of a grader: the name in the topology
    password: str
    expires: Instant
    is_revoked: bool = False


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the accounts of one run's server."""

    run: str
    graders: tuple[str, ...] = ()  # names in the topology
    clients: tuple[ExternalClient, ...] = ()  # whose logins the server accepts


class _Service(msgspec.Struct, frozen=True):
    """A subject of the account RUN on which external clients may publish, and from which they get answers."""

    subject: str
    has_many_answers: bool = False
    alias: str = ""  # name of the subject in the external account, if it differs

    @property
    def name(self) -> str:
        """The subject on which the external clients publish."""
        return self.alias or self.subject


class _Account(msgspec.Struct, frozen=True):
    """An account of external clients: what it imports from the account RUN."""

    name: str
    services: list[_Service]
    stream: str | None = None  # subjects of which it receives all messages


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects of one external client."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def _grader_services(run: str, grader: str) -> list[_Service]:
    """Return what the workers of one grader may publish on: pull, acknowledge, answer, and read stored prompts.

    JetStream clients request the consumer's state before they pull. Under $JS.API two accounts answer: the external
    one, which has no JetStream, answers first, with an error. So these clients use the run's name as their domain.
    """
    token = grader_token(grader)
    consumer = f"{stream_of(run, Plane.WORK)}.{score_durable(token)}"
    pull, info = f"CONSUMER.MSG.NEXT.{consumer}", f"CONSUMER.INFO.{consumer}"
    return [
        _Service(f"$JS.API.{pull}", has_many_answers=True),
        _Service(f"$JS.API.{pull}", has_many_answers=True, alias=f"$JS.{run}.API.{pull}"),
        _Service(f"$JS.API.{info}", alias=f"$JS.{run}.API.{info}"),
        _Service(f"$JS.ACK.{consumer}.>"),
        _Service(scores_filter(run, token)),
        _Service(f"$JS.API.DIRECT.GET.{stream_of(run, Plane.DATA)}.{prompt_filter(run)}"),
    ]


def _viewer_services(run: str) -> list[_Service]:
    """Return what viewers may publish on: reads of stored events."""
    return [_Service(f"$JS.API.DIRECT.GET.{stream_of(run, Plane.EVENT)}", has_many_answers=True)]


def _auditor_services(run: str) -> list[_Service]:
    """Return what auditors may publish on: reads of the stored data plane."""
    return [_Service(f"$JS.API.DIRECT.GET.{stream_of(run, Plane.DATA)}", has_many_answers=True)]


def rights_of(run: str, client: ExternalClient) -> Rights:
    """Return what one external client may publish and subscribe to."""
    inbox = f"{inbox_prefix(run, client.name)}.>"
    match client.kind:
        case ClientKind.GRADER:
            services, streams = _grader_services(run, client.grader), ()
        case ClientKind.VIEWER:
            services, streams = _viewer_services(run), (plane_filter(run, Plane.EVENT),)
        case ClientKind.AUDITOR:
            services, streams = _auditor_services(run), ()
    return Rights(publish=tuple(service.name for service in services), subscribe=(inbox, *streams))


def credential_of(run: str, client: ExternalClient, *, url: str, certificate: str) -> Credential:
    """Return the credential of one external client.

    Args:
        run: name of the run.
        client: to describe.
        url: of the run's server.
        certificate: PEM certificate of the server.
    """
    inbox = inbox_prefix(run, client.name)
    event, work, data = (stream_of(run, plane) for plane in (Plane.EVENT, Plane.WORK, Plane.DATA))
    token = grader_token(client.grader)
    if client.kind is ClientKind.VIEWER:
        own = {"stream": event, "events": plane_filter(run, Plane.EVENT), "history": f"$JS.API.DIRECT.GET.{event}"}
    elif client.kind is ClientKind.AUDITOR:
        own = {"stream": data, "history": f"$JS.API.DIRECT.GET.{data}"}
    else:
        durable = score_durable(token)
        own = {
            "stream": work,
            "grader": client.grader,
            "token": token,
            "domain": run,
            "durable": durable,
            "pull": f"$JS.API.CONSUMER.MSG.NEXT.{work}.{durable}",
            "answers": scores_filter(run, token),
            "prompts": f"$JS.API.DIRECT.GET.{data}.{prompt_filter(run).removesuffix('>')}",
        }
    return Credential(
        kind=client.kind,
        run=run,
        name=client.name,
        url=url,
        tls_name=NAME,
        user=client.name,
        password=client.password,
        expires=client.expires,
        inbox=inbox,
        certificate=certificate,
        **own,
    )


def render_accounts(accounts: Accounts, node: Login) -> str:
    """Render the part of the server's configuration that defines its accounts.

    Args:
        accounts: of the run.
        node: login of node daemons and actors.

    Raises:
        ValueError: the login of nodes is a token.
    """
    if node.user is None:
        raise ValueError("accounts need a user and a password for the nodes of a run, not a token")
    external = _external_accounts(accounts)
    lines = [
        "accounts {",
        f"  {RUN_ACCOUNT} {{",
        "    jetstream: enabled",
        f"    users: [ {{ user: {_quoted(node.user)}, password: {_quoted(node.password.reveal())} }} ]",
        *_list("exports", _exports(external)),
        "  }",
    ]
    for account in external:
        imports = [_import(service) for service in account.services]
        imports += [] if account.stream is None else [f"{{ stream: {_from_run(account.stream)} }}"]
        users = [_user(accounts.run, client) for client in accounts.clients if _account_of(client) == account.name]
        limits = f"{{ max_conn: {MAX_CONNECTIONS} }}"
        lines += [f"  {account.name} {{", f"    limits: {limits}", *_list("imports", imports), *_list("users", users)]
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _external_accounts(accounts: Accounts) -> list[_Account]:
    run = accounts.run
    of_graders = [_Account(_account_of_grader(grader), _grader_services(run, grader)) for grader in accounts.graders]
    viewers = _Account(VIEWERS, _viewer_services(run), plane_filter(run, Plane.EVENT))
    return [*of_graders, viewers, _Account(AUDITORS, _auditor_services(run))]


def _account_of_grader(grader: str) -> str:
    return f"GRADERS-{grader_token(grader)}"


def _account_of(client: ExternalClient) -> str:
    match client.kind:
        case ClientKind.GRADER:
            return _account_of_grader(client.grader)
        case ClientKind.VIEWER:
            return VIEWERS
        case ClientKind.AUDITOR:
            return AUDITORS


def _exports(external: list[_Account]) -> list[str]:
    """Return the lines that offer each subject to the accounts that import it, and to no other."""
    offered: dict[str, dict[str, None]] = {}  # names of accounts, by what they import
    for account in external:
        of_stream = [] if account.stream is None else [f"stream: {_quoted(account.stream)}"]
        for what in [*map(_exported, account.services), *of_stream]:
            offered.setdefault(what, {})[account.name] = None
    return [f"{{ {what}, accounts: [{', '.join(names)}] }}" for what, names in offered.items()]


def _exported(service: _Service) -> str:
    answers = ", response_type: Stream" if service.has_many_answers else ""
    return f"service: {_quoted(service.subject)}{answers}"


def _import(service: _Service) -> str:
    alias = f", to: {_quoted(service.alias)}" if service.alias else ""
    return f"{{ service: {_from_run(service.subject)}{alias} }}"


def _from_run(subject: str) -> str:
    return f"{{ account: {RUN_ACCOUNT}, subject: {_quoted(subject)} }}"


def _user(run: str, client: ExternalClient) -> str:
    rights = rights_of(run, client)
    allowed = [
        f"{what}: {{ allow: [{', '.join(map(_quoted, subjects))}] }}"
        for what, subjects in (("publish", rights.publish), ("subscribe", rights.subscribe))
    ]
    login = f"user: {_quoted(client.name)}, password: {_quoted(client.password)}"
    return f"{{ {login}, permissions: {{ {', '.join(allowed)} }} }}"


def _list(name: str, items: Iterable[str]) -> list[str]:
    return [f"    {name}: [", *(f"      {item}" for item in items), "    ]"]


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
