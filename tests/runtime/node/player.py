"""A process for tests of the node daemon: plays a small run by publishing its events, steered by its arguments.

player.py STEPS [--then finish|fail|sleep|crash|input_error|fenced] [--wait FILE] [--odd]
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio

from messages import (
    BatchReady,
    BatchTrained,
    GroupCompleted,
    GroupRef,
    GroupsIssued,
    IssuedGroup,
    Outcome,
    RunFailed,
    RunFinished,
    SampleStatus,
    SampleSummary,
    VerdictGiven,
)
from runtime.bus.bus import Bus
from runtime.util.exit_codes import EXIT_FENCED, EXIT_INPUT_ERROR


async def play(bus: Bus, step: int) -> None:
    issued = IssuedGroup(group_id=step, attempt=0, prompt=step)
    await bus.publish(GroupsIssued(incarnation=1, round=step, min_version=1, groups=(issued,)))
    sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, prompt_len=4, response_len=8, reward=0.5)
    group = GroupCompleted(
        group_id=step, attempt=0, lease="x", round=step, instance="player", data="d", samples=(sample,)
    )
    seq = await bus.publish(group)
    await bus.publish(VerdictGiven(group_id=step, attempt=0, event_seq=seq, outcome=Outcome.KEEP))
    ref = GroupRef(group_id=step, attempt=0, event_seq=seq)
    await bus.publish(BatchReady(incarnation=1, step=step, groups=(ref,)))
    await bus.publish(
        BatchTrained(step=step, incarnation=1, num_groups=1, num_samples=1, num_tokens=12, metrics={"train/loss": 0.5})
    )


async def play_odd(bus: Bus, num_steps: int) -> None:
    """What our own actors do not write, and a report may meet all the same: no samples, no groups."""
    group = GroupCompleted(group_id=99, attempt=0, lease="x", round=0, instance="player", data="d", samples=())
    await bus.publish(group)
    await bus.publish(BatchReady(incarnation=1, step=num_steps - 1, groups=()))


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--then", default="finish")
    parser.add_argument("--wait", type=Path)
    parser.add_argument("--odd", action="store_true")
    args = parser.parse_args()
    async with Bus.connect(os.environ["PHYSARUM_BUS_URL"], os.environ["PHYSARUM_RUN"], name="player") as bus:
        if args.odd:
            await play_odd(bus, args.steps)
        for step in range(args.steps):
            await play(bus, step)
        sys.stdout.write(f"played {args.steps} steps\n")
        while args.wait is not None and not args.wait.exists():  # noqa: ASYNC110 - the test's signal
            await anyio.sleep(0.02)
        if args.then == "finish":
            await bus.publish(RunFinished(incarnation=1, steps=args.steps, reason="all steps trained"))
        if args.then == "fail":
            await bus.publish(RunFailed(incarnation=1, steps=args.steps, reason="the player has had enough"))
    if args.then == "crash":
        raise RuntimeError("the player stumbled")
    if args.then == "input_error":
        sys.stderr.write("player.0: no such data\n")
    if args.then == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.then == "family":  # a grandchild in a session of its own
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)  # noqa: ASYNC220
    if args.then in ("finish", "fail", "sleep", "hang", "family"):
        time.sleep(60)  # noqa: ASYNC251 - until it is stopped
    return {"input_error": EXIT_INPUT_ERROR, "fenced": EXIT_FENCED}[args.then]


if __name__ == "__main__":
    sys.exit(anyio.run(main))
