"""One session of an agent: its requests become turns of a sample's conversations, and no token is rendered again.

A session lives inside of the sample's generate function. Each branch of its tree is a conversation of the sample: the
first replaces the row's prompt, the others are opened, and share the sample's vote.
"""

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self

import anyio
import structlog

from actors.rollout.samples.arguments import checked_sampling
from actors.rollout.samples.context import Context
from actors.rollout.samples.conversation import Conversation
from actors.rollout.sessions.notes import TurnNote
from actors.rollout.sessions.rendering import Prompt, Rendering
from actors.rollout.sessions.tree import Asked, Node, Place, RestoredPlace, SampledTurn, TooManyBranches, Tree, Wish
from messages import Float32Array, Int32Array
from runtime.sessions.turns import ChatMessage, ToolCall, TurnAnswer, TurnRefused, TurnRequest, TurnSampling

log = structlog.get_logger()

REPEATED_S: Final = 600.0  # for so long, an answer without a further turn is given again to the same request
LAST_TOKENS: Final = 8  # of a prompt in tokens, enough to see whether it opens thoughts


class _Turn:
    """A turn in progress, and all who wait for it."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._is_accepted = False
        self._accepted: list[Callable[[], None]] = []
        self._outcome: TurnAnswer | TurnRefused = TurnRefused("failed", "the turn was not sampled")

    def end(self, outcome: TurnAnswer | TurnRefused) -> None:
        """Give all who wait an outcome; later ones do not count."""
        if not self._ended.is_set():
            self._outcome = outcome
            self._ended.set()

    def accept(self) -> None:
        """Tell all who wait that the turn is served, and those who join it later at once."""
        self._is_accepted = True
        while self._accepted:
            self._accepted.pop()()

    async def outcome(self, accepted: Callable[[], None]) -> TurnAnswer:
        self._accepted.append(accepted)
        if self._is_accepted:
            self.accept()
        await self._ended.wait()
        if isinstance(self._outcome, TurnRefused):
            raise _copied(self._outcome)
        return self._outcome


async def keep_nothing(_note: TurnNote) -> None:
    """Keep no notes: no process goes on with the session after this one."""


class _Input(NamedTuple):
    """The tokens before a turn that are not in its branch yet."""

    prompt: Prompt
    is_whole: bool  # from the beginning, instead of after the newest sampled turn


class Session:
    """Answers the requests of one agent, or of several that share a sample. Used as `async with`.

    At its end it waits for turns that are being sampled, since a turn that was begun trains. Turns run as tasks of the
    session: a client that goes away ends none.
    """

    def __init__(
        self,
        conversation: Conversation,
        rendering: Rendering,
        *,
        trains: Literal["tools", "all"] = "tools",
        clock: Callable[[], float] = time.monotonic,
        keep: Callable[[TurnNote], Awaitable[None]] = keep_nothing,
    ) -> None:
        """Open a session on a conversation that has not begun.

        Args:
            conversation: of the sample.
            rendering: of the served model.
            trains: "tools": turns of requests without tools, such as those for a title, do not train if other requests
                have tools. "all": they do.
            clock: seconds; for the age of answers.
            keep: called with a note of each turn, before its answer is returned.
        """
        self.tree = Tree()
        self._conversation = conversation
        self._rendering = rendering
        self._clock, self._keep = clock, keep
        self._most = len(conversation.prompt_ids) + conversation.sampling.max_new_tokens - 1  # tokens of a prompt
        self._contexts: dict[int, Context] = {}  # by branch
        self._numbers: dict[Node, int] = {}  # of the sampled nodes, in the order of their ends
        self._trains = trains
        self._with_tools: dict[int, bool] = {}  # by branch
        self._running: dict[tuple[Node, Wish], _Turn] = {}
        self._tasks = anyio.create_task_group()
        self._stack = AsyncExitStack()
        self._refusal: TurnRefused | None = TurnRefused("ended", "the session has not begun")

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._tasks)
        self._refusal = None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._refusal = self._refusal or TurnRefused("ended", "the session has ended")
        try:
            return await self._stack.__aexit__(kind, error, trace)
        finally:
            self._note()

    async def turn(self, request: TurnRequest, accepted: Callable[[], None] = lambda: None) -> TurnAnswer:
        """Return the next message of the model.

        A request that was sent before gets the same turn: one that is being sampled is joined, and an answer that the
        client did not get, or did nothing with in ten minutes, is given again. A caller that is cancelled ends no turn.

        Args:
            request: of a client.
            accepted: called once the turn has been served to the engine, so that the request is not refused any more.

        Raises:
            TurnRefused: the session has ended or failed, the prompt does not fit, or a parameter is not served.
        """
        self._check(request)
        place, wish = self.tree.find(request), Wish(request.sampling, request.model, request.choice)
        if place.is_recorded:
            if (running := self._running.get((place.node, wish))) is not None:
                return await running.outcome(accepted)
            if (recorded := self._recorded(place.node, wish)) is not None:
                recorded.is_undelivered = False
                accepted()
                return _answer(recorded)
        return await self._start(request, place).outcome(accepted)

    async def count(self, request: TurnRequest) -> int:
        """Return the number of tokens of the prompt that a request would have. Changes nothing.

        Raises:
            TurnRefused: the session has ended or failed, or the chat template refuses or leaves out a message.
        """
        self._check(request)
        above = self.tree.find(request).node.sampled_above
        if request.prompt_ids is not None:
            return len(request.prompt_ids)
        try:
            prompt, is_whole = await self._rendered(request, above)
        except ValueError as error:
            raise TurnRefused("parameter", str(error)) from None
        return len(prompt.ids) + (0 if is_whole or above is None else above.num_ids)

    def note_undelivered(self, request: TurnRequest) -> None:
        """Note that the client did not get the whole answer to a request, so that it may ask again at any time."""
        place, wish = self.tree.find(request), Wish(request.sampling, request.model, request.choice)
        for child in place.node.children:
            if child.wish == wish and place.is_recorded:
                child.is_undelivered = True

    def cancel_turns(self) -> None:
        """Cancel the turns that are being sampled, so that the session can end at once.

        For a sample that failed or starts again: another one fails, since it ends in the middle of a turn.
        """
        for running in self._running.values():
            running.scope.cancel()

    def _check(self, request: TurnRequest) -> None:
        if self._refusal is not None:
            raise _copied(self._refusal)
        sampling = request.sampling
        try:
            checked_sampling(sampling.temperature, sampling.top_p, sampling.top_k)
            self._conversation.model.check_stop(sampling.stop)
            self._conversation.model.check_ids((*(request.prompt_ids or ()), *sampling.stop_token_ids))
        except ValueError as error:
            raise TurnRefused("parameter", str(error)) from None
        if sampling.max_tokens is not None and sampling.max_tokens < 1:
            raise TurnRefused("parameter", f"max_tokens = {sampling.max_tokens}: a turn has at least 1 token")
        if not request.messages and not request.prompt_ids:
            raise TurnRefused("parameter", "messages: expected at least one")

    def _recorded(self, node: Node, wish: Wish) -> Node | None:
        """Return the turn that a client asks for once more; None: it wants another one."""
        found = next((child for child in reversed(node.children) if child.wish == wish), None)
        if found is None or found.children:
            return None
        return found if found.is_undelivered or self._clock() - found.ended_at <= REPEATED_S else None

    def _start(self, request: TurnRequest, place: Place) -> _Turn:
        try:
            asked = self.tree.start(request, place)
        except TooManyBranches as error:
            raise self._fail(str(error)) from None
        running = self._running[asked.node, asked.wish] = _Turn()
        self._tasks.start_soon(self._run, request, asked, running)
        return running

    def _fail(self, reason: str) -> TurnRefused:
        """Fail the session and its sample, which does not train."""
        self._conversation.end("failed", reason)
        self._refusal = self._refusal or TurnRefused("failed", reason)
        return TurnRefused("failed", reason)

    async def _run(self, request: TurnRequest, asked: Asked, running: _Turn) -> None:
        """Sample a turn, and end the wait of all who asked for it, however it ends."""
        key = asked.node, asked.wish
        try:
            with running.scope:
                running.end(_answer(await self._sampled(request, asked, running.accept)))
        except TurnRefused as refused:
            running.end(refused)
        finally:
            del self._running[key]
            running.end(self._refusal or TurnRefused("failed", "the turn was not sampled to its end"))

    async def _sampled(self, request: TurnRequest, asked: Asked, accept: Callable[[], None]) -> Node:
        try:
            asked, given = await self._input(request, asked)
            context = self._context_of(asked, given, has_tools=bool(request.tools or request.prompt_ids))
            accept()
        except TooManyBranches as error:
            self.tree.refuse(asked)
            raise self._fail(str(error)) from None
        except ValueError as error:
            self.tree.refuse(asked)
            raise TurnRefused("parameter", str(error)) from None
        except BaseException:
            self.tree.refuse(asked)
            raise
        try:
            ids = [] if asked.is_new else given.prompt.ids
            await self._generate(request.sampling, context, ids, given.prompt.text)
        except BaseException:  # an abort of the engine among them: a turn that did not end is no turn
            self.tree.give_up(asked)
            raise
        tokens, spans, is_cut_off = context.newest_turn
        is_ended = self._rendering.is_ended(tokens.ids[-1])
        message = self._message(request, tokens.ids[: len(tokens.ids) - is_ended], given.prompt.in_thoughts)
        finish = "length" if is_cut_off and not is_ended else "tool_calls" if message.tool_calls else "stop"
        ids, log_probs = Int32Array(tokens.ids), Float32Array(tokens.log_probs)
        turn = SampledTurn(Int32Array(given.prompt.ids), ids, log_probs, spans, finish, given.is_whole)
        node = self.tree.end(asked, message, turn, self._clock())
        self._numbers[node] = len(self._numbers)
        await self._keep(self._note_of(node, request))
        return node

    def _note_of(self, node: Node, request: TurnRequest) -> TurnNote:
        assert node.parent is not None
        assert node.meaning is not None
        assert node.turn is not None
        above = node.parent.sampled_above
        between = node.parent.path()[0 if above is None else above.depth + 1 :]
        ids = [each.prompt_ids for each in between if each.prompt_ids is not None]
        own_s, waited_s = self._conversation.times_s
        return TurnNote(
            after=-1 if above is None else self._numbers[above],
            path=tuple(each.meaning.message for each in between if each.meaning is not None),
            path_ids=tuple(token for piece in ids for token in piece.tolist()) if request.prompt_ids else None,
            tools=request.tools if above is None else (),
            sampling=request.sampling,
            model=request.model,
            choice=request.choice,
            branch=node.branch,
            cause=self.tree.branches[node.branch].cause,
            part=self._contexts[node.branch].part,
            has_tools=self._with_tools[node.branch],
            is_whole=node.turn.is_whole,
            message=node.meaning.message,
            finish=node.turn.finish,
            ended_at=node.ended_at,
            own_s=own_s,
            waited_s=waited_s,
        )

    async def restore(self, notes: Sequence[TurnNote]) -> None:
        """Go on from the turns of an earlier process, whose tokens the sample has. Sends nothing to an engine.

        Args:
            notes: of these turns, in their order.

        Raises:
            ValueError: the sample has other conversations.
        """
        nodes: list[Node] = []
        for note in notes:
            above = nodes[note.after] if note.after >= 0 else None
            context, given = self._restored_input(note, above)
            is_first = not context.num_turns
            text = "" if is_first else self._conversation.model.decode(given)
            await self._generate(note.sampling, context, [] if is_first else given, text)
            tokens, spans, _ = context.newest_turn
            ids, log_probs = Int32Array(tokens.ids), Float32Array(tokens.log_probs)
            turn = SampledTurn(Int32Array(given), ids, log_probs, spans, note.finish, note.is_whole)
            place = RestoredPlace(above, note.path, note.path_ids, note.tools, note.branch, note.cause, note.ended_at)
            wish = Wish(note.sampling, note.model, note.choice)
            node = self.tree.restore(place, note.message, turn, wish)
            self._numbers[node] = len(nodes)
            nodes.append(node)
        for node in nodes:
            node.is_undelivered = True  # its client may not have got it
        if notes:
            self._conversation.add_times(notes[-1].own_s, notes[-1].waited_s)

    def _restored_input(self, note: TurnNote, above: Node | None) -> tuple[Context, list[int]]:
        """Return the conversation of a turn that is restored, and the tokens before the turn that are new in it."""
        if (context := self._contexts.get(note.branch)) is not None:
            return context, context.recorded_input
        prompt = self._conversation.recorded_prompt(note.part)
        if self._contexts:
            context = self._conversation.open(prompt)
        else:
            context = self._conversation
            self._conversation.begin(prompt)
        if context.part != note.part:
            raise ValueError(f"conversation {note.part} of the sample cannot be opened before {context.part}")
        self._contexts[note.branch], self._with_tools[note.branch] = context, note.has_tools
        return context, prompt if note.is_whole or above is None else prompt[above.num_ids :]

    async def _input(self, request: TurnRequest, asked: Asked) -> tuple[Asked, _Input]:
        """Return what is new before a turn.

        Raises:
            ValueError: the chat template refuses or leaves out a message.
        """
        above = asked.above
        if request.prompt_ids is not None:
            added = asked.node.prompt_ids
            ids = list(request.prompt_ids) if asked.is_new or added is None else added.tolist()
            return asked, _Input(Prompt(self._conversation.model.decode(ids[-LAST_TOKENS:]), ids), asked.is_new)
        prompt, is_whole = await self._rendered(request, above)
        if is_whole and request.tools and request.tools[0].name not in prompt.text:
            log.warning("chat_template_leaves_out_tools", tool=request.tools[0].name)
        if not is_whole or above is None:
            return asked, _Input(prompt, is_whole)
        recorded = above.ids.tolist()
        if prompt.ids[: len(recorded)] == recorded:
            return asked, _Input(Prompt(prompt.text, prompt.ids[len(recorded) :]), False)
        return self.tree.fork_by_template(asked), _Input(prompt, True)

    async def _rendered(self, request: TurnRequest, above: Node | None) -> tuple[Prompt, bool]:
        """Render the prompt after a sampled turn, or all of it; return also whether it is all. Off the event loop."""
        render, run = self._rendering, anyio.to_thread.run_sync
        if above is None or not render.renders_tails:
            return await run(render.whole, request.messages, request.tools), True
        assert above.meaning is not None
        assert above.turn is not None
        tail, last = request.messages[above.depth :], int(above.turn.ids[-1])
        return await run(render.tail, above.meaning.message, last, tail, request.tools), False

    def _context_of(self, asked: Asked, given: _Input, *, has_tools: bool) -> Context:
        """Return the conversation of a branch; open it with its prompt if it is new.

        Raises:
            TurnRefused: there is no room for a token after the prompt.
            ValueError: the prompt has a token that is not the model's.
        """
        ids = given.prompt.ids
        if not asked.is_new:
            context = self._contexts[asked.branch]
            num_tokens = len(context.prompt_ids) + len(context.ids) + len(ids)
            if context.room - len(ids) < 1:
                raise self._full(num_tokens)
            return context
        if asked.above is not None and not given.is_whole:
            ids = [*asked.above.ids.tolist(), *ids]
        if len(ids) > self._most:
            raise self._full(len(ids))
        if self._contexts:
            context = self._conversation.open(ids)
        else:
            context = self._conversation
            self._conversation.begin(ids)
        self._contexts[asked.branch] = context
        self._with_tools[asked.branch] = has_tools
        return context

    def _full(self, num_tokens: int) -> TurnRefused:
        reason = f"the prompt is too long: {num_tokens} tokens > {self._most} maximum"
        return TurnRefused("context_full", reason, num_tokens, self._most)

    async def _generate(self, sampling: TurnSampling, context: Context, ids: list[int], text: str) -> None:
        """Let an engine sample the turn. What its request says of sampling counts as in `Context.generate`."""
        with context.input_of_a_turn():
            if ids:
                context.append_ids(ids)
                context.text += text
            room = context.room
            await context.generate(
                stop=sampling.stop or None,
                max_new_tokens=room if sampling.max_tokens is None else min(room, sampling.max_tokens),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=sampling.stop_token_ids,
            )

    def _message(self, request: TurnRequest, ids: list[int], in_thoughts: bool) -> ChatMessage:
        """Read what was sampled. Calls of tools get ids that no other call of the session has."""
        text = self._conversation.model.decode(ids)
        places = [place for stop in request.sampling.stop if (place := text.find(stop)) >= 0]
        text = text[: min(places, default=len(text))]
        tools = {tool.name: tool for tool in request.tools}
        parsed = self._rendering.format.parse(text, tools, in_thoughts)
        calls = tuple(ToolCall(f"call_{uuid.uuid4().hex[:24]}", call.name, call.arguments) for call in parsed.calls)
        return ChatMessage("assistant", parsed.text, parsed.reasoning, calls)

    def _note(self) -> None:
        """Settle what trains, note in the sample's metadata what became of the session, warn of forks by template."""
        num_turns, forks = sum(1 for _ in self.tree.sampled), self.tree.forks
        noted = {"turns": num_turns, "extended": self.tree.num_extended, "forks": dict(forks)}
        self._conversation.sample_metadata["session"] = noted
        if self._trains == "tools" and any(self._with_tools.values()):
            for context in (self._contexts[branch] for branch, has_tools in self._with_tools.items() if not has_tools):
                for number in range(context.num_turns):
                    context.do_not_train(number)
        if not self._rendering.renders_tails and num_turns:
            share = forks["template"] / num_turns
            log.warning("unknown_chat_template", forks=forks["template"], turns=num_turns, share=round(share, 3))


def _copied(refused: TurnRefused) -> TurnRefused:
    """Return a refusal for one more caller: an exception is raised once."""
    return TurnRefused(refused.kind, refused.reason, refused.num_tokens, refused.max_tokens)


def _answer(node: Node) -> TurnAnswer:
    assert node.turn is not None
    assert node.meaning is not None
    turn, ids = node.turn, tuple(node.turn.ids.tolist())
    num_prompt_tokens = node.num_ids - len(ids)
    return TurnAnswer(node.meaning.message, turn.finish, num_prompt_tokens, ids, tuple(turn.log_probs.tolist()))
