"""Whether a started buffer may go on with its prompts: the ledger refers to them by number."""

from pathlib import Path

from anyio import to_thread

from actors.buffer.prompts.drawn import DrawnPrompts
from actors.buffer.prompts.generated import GeneratedPrompts
from actors.buffer.prompts.source import PromptSet
from messages import PromptsLoaded
from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadLost
from runtime.ledger.archive import first_archived
from runtime.ledger.state import LedgerState
from runtime.process.actor import InputError

TrainingPrompts = PromptSet | GeneratedPrompts | DrawnPrompts


async def refuse_other_data(prompts: TrainingPrompts, bus: Bus, run_dir: Path, run: str) -> None:
    """Refuse data that differs from the data of the run's start.

    With other data, a resumed run would repeat some prompts and skip others.

    Args:
        prompts: as loaded now.
        bus: bus with the run's log.
        run_dir: run directory, with the archived part of the log.
        run: name of the run, for the error.

    Raises:
        InputError: a data source or an evaluation set has another fingerprint.
    """
    known: dict[str, list[str]] = {}  # a training source and an evaluation set may share a name
    first = await to_thread.run_sync(lambda: list(first_archived(run_dir)), abandon_on_cancel=True)
    announced = [received.message for received in first if isinstance(received.message, PromptsLoaded)]
    async with bus.read(PromptsLoaded) as events:
        announced += [received.message async for received in events.so_far()]
    for loaded in announced:
        if loaded.fingerprint:
            known.setdefault(loaded.data, []).append(loaded.fingerprint)
    for loaded in prompts.loaded:
        before = known.get(loaded.data, [loaded.fingerprint])
        if loaded.fingerprint not in before:
            raise InputError(
                f"data {loaded.data} changed since this run began: its fingerprint is {loaded.fingerprint}, "
                f"it was {' or '.join(dict.fromkeys(before))}. Restore its file and its tokenizer, "
                f"choose another run.name, or start over with --fresh {run}"
            )


async def resume_source(prompts: TrainingPrompts, bus: Bus, state: LedgerState, run: str) -> None:
    """Go on from the state of a data source in the ledger.

    Args:
        prompts: as loaded now.
        bus: bus with the stored draws.
        state: the ledger.
        run: name of the run, for the error.

    Raises:
        InputError: the run began with another kind of data, or the state is lost.
    """
    drawn = isinstance(prompts, DrawnPrompts)
    if state.next_prompt and drawn != bool(state.draws):
        before, now = ("without", "with") if drawn else ("with", "without")
        raise InputError(
            f"this run began {before} data.source_class, and would go on {now} it: restore the recipe, choose "
            f"another run.name, or start over with --fresh {run}"
        )
    if isinstance(prompts, DrawnPrompts):
        try:
            await prompts.resume(bus, state)
        except PayloadLost as error:
            raise InputError(
                f"the state of the data source is lost, so its prompts cannot go on: {error}. Choose another "
                f"run.name, or start over with --fresh {run}"
            ) from error
