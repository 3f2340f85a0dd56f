"""Runs rollout functions that were written for slime: (args, rollout_id, data_buffer, evaluation).

The groups that `data_buffer` hands out are those of one call of `rollout.custom_rollout`. Each sample is a conversation
that stays open until the function returns: what is posted for it becomes its turns, with stored tokens and weight
versions, and what the function returned of it is compared with them. A group that it does not return fails alone.

Calls run one at a time, in a thread with an event loop that lives on between them, as slime runs them.
"""

import asyncio
import contextlib
import contextvars
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, cast

import anyio
import structlog
from anyio.from_thread import BlockingPortal

from actors.rollout.samples.generate_function import KEY as GENERATE_KEY
from actors.rollout.samples.must_end import end_process
from actors.rollout.samples.rollout_function import KEY, PromptGroup
from actors.rollout.sglang.served_model import ServedModel
from actors.rollout.slime.call import Call, CallSettings, Function, cancel_all
from runtime.compat.slime.functions import original, router_of_function
from runtime.compat.slime.rollouts import generate as generate_once
from runtime.compat.slime.rollouts import rollout_call
from runtime.functions.table import GENERATE
from runtime.settings.derived import reward_keys
from runtime.settings.topology import Topology
from runtime.util.tracebacks import shown_error

log = structlog.get_logger()

END_S: Final = 5.0  # that a call which is ended may take; then its thread is left alone
MAX_LEFT: Final = 8  # threads whose calls did not end; with so many, this process ends and is started again


class SlimeRollout:
    """A rollout function of slime, as a rollout function of a run."""

    reopens_samples = True  # a repeated call goes through all samples of its groups again

    def __init__(self, function: Function, settings: CallSettings) -> None:
        self._function, self._settings = function, settings
        self._turn = anyio.Lock()  # calls run one at a time
        self._thread: _CallThread | None = None
        self._num_left = 0
        self._ends: asyncio.Task[None] | None = None  # ends this process
        self._refused: Exception | None = None  # what no later call can do either

    async def __call__(self, given: Any) -> None:
        """Run the function for prompt groups.

        Raises:
            ValueError: it returned something else than samples, or raised.
        """
        groups = cast("list[PromptGroup]", given if isinstance(given, list) else [given])
        with groups[0].waiting():
            await self._turn.acquire()
        try:
            await self._run(groups)
        finally:
            self._turn.release()

    async def _run(self, groups: list[PromptGroup]) -> None:
        if self._refused is not None:
            raise self._refused
        if self._ends is not None:
            with groups[0].waiting():
                await anyio.sleep_forever()  # until the process ends; the groups come again
        thread = self._thread = self._thread or _CallThread()
        failed: Exception | None = None
        async with anyio.create_task_group() as samples:
            async with BlockingPortal() as portal:
                call = Call(self._settings, groups, thread.loop, portal, samples)
                try:
                    returned = await self._in_thread(thread, call)
                    call.settle(returned)
                except Exception as error:  # noqa: BLE001 - of the user's function
                    failed = error
                finally:
                    await portal.stop(cancel_remaining=True)
            if failed is not None:
                samples.cancel_scope.cancel()
        if failed is not None:
            raise failed

    async def _in_thread(self, thread: "_CallThread", call: Call) -> Any:
        task = call.groups[0].task
        number = task.min_version if task.round is None else task.round
        more = {"evaluation": task.round is None}
        if "evaluation" not in inspect.signature(self._function).parameters:
            more = {}
        job = _Job(call, lambda: self._function(call.args, number, call.buffer, **more))
        thread.jobs.put(job)
        try:
            await job.ended.wait()
        except BaseException:
            call.cancel()
            with anyio.move_on_after(END_S, shield=True):
                await job.ended.wait()
            if not job.ended.is_set():
                self._thread, self._num_left = None, self._num_left + 1
                log.warning("call_never_ended", key=KEY, num_threads=self._num_left)
                if self._num_left == MAX_LEFT:
                    self._ends = asyncio.create_task(
                        end_process(f"{KEY}: {MAX_LEFT} calls of the function never ended")
                    )
            raise
        self._refused = self._refused or call.refused
        if self._refused is not None:
            raise self._refused
        if isinstance(job.error, Exception):
            raise job.error
        if job.error is not None:
            raise ValueError(f"the function raised {shown_error(job.error)}") from job.error
        return job.returned


def rollout_of(function: Function, topology: Topology, model: ServedModel) -> SlimeRollout:
    """Make a rollout function of slime one of this run, with the generate function of the recipe."""
    name = topology.rollout.custom_generate
    generate: Function = generate_once
    if name is not None:  # also of slime, as the rules check
        generate = original(GENERATE, GENERATE_KEY, name).function
    group_rm = topology.reward.group_rm
    sees_rewards = not (group_rm or reward_keys(topology.algorithm))  # a sample has one number, no named rewards
    return SlimeRollout(function, CallSettings(generate, model, topology.rollout, group_rm, sees_rewards))


class _Job:
    """One call of the function, for the thread that runs it."""

    def __init__(self, call: Call, function: Callable[[], Any]) -> None:
        self.returned: Any = None
        self.error: BaseException | None = None
        self.ended = anyio.Event()
        self._call, self._function = call, function
        self._home = asyncio.get_running_loop()

    def run(self) -> None:
        """Run the function to its end, and end the tasks that it left behind."""
        context = contextvars.copy_context()
        context.run(rollout_call.set, self._call)
        context.run(router_of_function.set, self._call)
        try:
            if not self._call.is_over:
                self.returned = context.run(self._function)
                if inspect.isawaitable(self.returned):
                    raise TypeError("it is async: slime calls it as a plain function, which calls `run`")
        except BaseException as error:  # noqa: BLE001 - also SystemExit: the user's code ends here
            self.error = error
        self._call.has_returned = True
        self._call.close()
        _end_tasks(self._call.loop)
        with contextlib.suppress(RuntimeError):  # the actor has ended
            self._home.call_soon_threadsafe(self.ended.set)


class _CallThread:
    """A thread with an event loop that runs calls one after the other."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._work, name="slime-rollout", daemon=True).start()

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            self.jobs.get().run()


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks that a call left behind, and wait for their end."""
    if tasks := asyncio.all_tasks(loop):
        cancel_all(loop)
        loop.run_until_complete(asyncio.wait(tasks))
