"""Turns the flags of a slime start script into settings: a recipe and a topology, with a remark for every flag."""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Final

import msgspec

from bin.slime_scripts.defaults import (
    absent_settings,
    adapters,
    leave_ignored,
    micro_batches,
    named_choices,
    whole_choices,
)
from bin.slime_scripts.given import (
    Flags,
    Left,
    Setting,
    WrongValue,
    answer_of,
    first,
    is_off,
    leave_environment,
    number_in,
    typed,
    whole_number,
)
from bin.slime_scripts.script import Given, StartScript
from runtime.compat.slime.flags import find_by_rule, find_flag, from_slime
from runtime.settings.rules.recipe import MAX_KEPT

GPUS_PER_NODE: Final = 8  # slime's default
CONVERTED: Final = "_torch_dist"  # slime's scripts name a converted checkpoint so
NEEDED: Final = ("hf-checkpoint", "prompt-data")
EVAL: Final = "eval.0."
HUB: Final = "slime.rollout.filter_hub.dynamic_sampling_filters."
SFT: Final = "slime.rollout.sft_rollout.generate_rollout"
FULLY_ASYNC: Final = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
ROLLOUT: Final = "slime.rollout.sglang_rollout.generate_rollout"  # slime's default
ROLLOUT_FLAG: Final = "rollout-function-path"
ONE_TURN: Final = "slime:slime.rollout.sglang_rollout:generate"
SLOTS: Final = 512  # slime's default of --sglang-server-concurrency
TIS: Final = "custom-tis-function-path"
FUNCTION: Final = re.compile(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*")
FUNCTIONS: Final = {
    "dynamic-sampling-filter-path": "rollout.dynamic_filter",
    "custom-generate-function-path": "rollout.custom_generate",
    "custom-reward-post-process-path": "algorithm.estimator.function",
}  # flags that name a function of the user, which runs here as slime:module:function; also custom-rm-path, and TIS


class CannotConvert(Exception):
    """The script's flags make no recipe; the text says which, each with its place."""


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """A start script as settings."""

    settings: tuple[Setting, ...]
    left: tuple[Left, ...]


def convert_script(script: StartScript, name: str) -> Converted:
    """Turn a start script's flags into settings.

    Args:
        script: its flags. If a flag is given twice, the last one counts, as in slime.
        name: the run's name.

    Raises:
        CannotConvert: a value is missing that only the machine of the script knows.
    """
    flags = Flags(script)
    settings = [Setting(key="run.name", value=name, remark=""), *_placement(flags), *_specials(flags)]
    for given in flags.rest():
        settings += _plain(flags, given)
    leave_environment(flags)
    settings += absent_settings(flags, {setting.key for setting in settings})
    lacking = [f"{script.program} gets no --{flag}" for flag in NEEDED if flags.peek(flag) is None]
    if flags.missing or lacking:
        raise CannotConvert("\n".join([*script.notes, *flags.missing, *lacking]))
    whole = list(whole_choices(flags, _without_twins(settings)))
    return Converted(settings=tuple(whole), left=tuple(flags.left))


def _placement(flags: Flags) -> Iterator[Setting]:
    """Place trainer and engines on GPUs as slime does: the trainer's first, then the engines', or both on the same."""
    nodes, per_node = flags.number("actor-num-nodes", 1), flags.number("actor-num-gpus-per-node", GPUS_PER_NODE)
    colocated, debug = flags.take("colocate") is not None, flags.take("debug-train-only")
    engines, training = flags.number("rollout-num-gpus", nodes * per_node), nodes * per_node
    on_node = flags.number("num-gpus-per-node", per_node if nodes > 1 or colocated else GPUS_PER_NODE)
    if colocated or debug is not None:
        engines = 0
    on_node = max(1, min(on_node, training + engines))
    count = math.ceil((training + engines) / on_node)
    yield Setting(key="bus.node", value="n0", remark="the node that runs the NATS server")
    for number in range(count):
        remark = "a machine; start the topology on each with --node" if number == 0 and count > 1 else ""
        yield Setting(key=f"nodes.n{number}", value={"address": "auto", "gpus": on_node}, remark=remark)
    where = "--actor-num-nodes, --actor-num-gpus-per-node"
    yield Setting(key="trainer.gpus", value=_gpus(0, training, on_node), remark=where)
    if debug is not None:
        is_sft = first(flags.peek("loss-type")) == "sft_loss"
        state, why = (
            ("no", "demonstrations train without engines") if is_sft else ("by hand", answer_of(debug.flag).remark)
        )
        flags.leave(debug, state, why)
        return
    if colocated:
        yield Setting(key="engines.policy.gpus", value=_gpus(0, training, on_node), remark="as the trainer's")
        yield Setting(key="engines.policy.colocate", value="trainer", remark="--colocate")
    elif engines == 0:
        flags.leave_taken("rollout-num-gpus", "by hand", answer_of("rollout-num-gpus").remark)
    else:
        yield Setting(key="engines.policy.gpus", value=_gpus(training, engines, on_node), remark="--rollout-num-gpus")
    if colocated and first(flags.peek("loss-type")) != "sft_loss":
        remark = "as slime does: groups in flight are halted once the batch is complete"
        yield Setting(key="rollout.release_when", value="batch_ready", remark=remark)
    yield from _transport(flags, colocated=colocated)


def _transport(flags: Flags, *, colocated: bool) -> Iterator[Setting]:
    """Say how weights reach the engines, and through which router requests do."""
    given = flags.take("update-weight-transport")
    if first(given) == "disk":
        transport, why = "disk", "--update-weight-transport"
    elif (whole_number(flags.peek("sglang-dp-size")) or 1) > 1:
        transport, why = "disk", "weights reach an engine with --sglang-dp-size above 1 through files"
    else:
        transport, why = ("ipc", "as slime does with --colocate") if colocated else ("collective", "slime's nccl")
    yield Setting(key="engines.policy.weight_transport", value=transport, remark=why)
    if flags.peek("sglang-router-ip") is not None and flags.peek("sglang-router-port") is not None:
        url = f"http://{flags.text('sglang-router-ip')}:{flags.text('sglang-router-port')}"
        yield Setting(key="engines.policy.router", value="sglang-router", remark="--sglang-router-ip")
        yield Setting(key="engines.policy.router_url", value=url, remark="--sglang-router-ip, --sglang-router-port")


def _gpus(first: int, count: int, on_node: int) -> str:
    """Write `count` GPUs from number `first` of all nodes: "n0:0-7,n1:0-3"."""
    parts: list[str] = []
    while count > 0:
        node, start = divmod(first, on_node)
        here = min(count, on_node - start)
        parts.append(f"n{node}:{start}" + (f"-{start + here - 1}" if here > 1 else ""))
        first, count = first + here, count - here
    return ",".join(parts)


def _specials(flags: Flags) -> Iterator[Setting]:
    yield from _model(flags)
    yield from _data(flags)
    yield from _batches(flags)
    yield from _algorithm(flags)
    yield from _evaluation(flags)
    yield from _sampling(flags)
    yield from micro_batches(flags)
    yield from adapters(flags)
    leave_ignored(flags)


def _sampling(flags: Flags) -> Iterator[Setting]:
    """Take log-probs over the kept tokens where slime does: with --rollout-top-p below 1."""
    given = flags.peek("rollout-top-p")
    top_p = number_in(first(given) or "1")
    if given is None or top_p is None or top_p >= 1:
        return
    if 2 <= (whole_number(flags.peek("rollout-top-k")) or 0) <= MAX_KEPT:
        remark = "slime takes log-probs over the tokens that --rollout-top-p keeps"
        yield Setting(key="rollout.return_sampling_mask", value=True, remark=remark)
    else:
        remark = (
            "slime takes log-probs over the kept tokens; here rollout.return_sampling_mask = true does, with a "
            f"rollout.top_k of 2 to {MAX_KEPT}"
        )
        flags.leave(given, "by hand", remark)


def _model(flags: Flags) -> Iterator[Setting]:
    checkpoint = flags.text("hf-checkpoint")
    if checkpoint is not None:
        yield Setting(key="model.hf_checkpoint", value=checkpoint, remark="--hf-checkpoint")
    flags.take("bf16")
    if flags.peek("fp16") is None:
        yield Setting(key="model.dtype", value="bfloat16", remark="slime's")
    reference, begin, save = (flags.take(flag) for flag in ("ref-load", "load", "save"))
    if save is not None:
        flags.leave(save, "no", answer_of("save").remark)
    where = (first(begin) or "").rstrip("/")
    if begin is not None and where:
        if (first(save) or "").rstrip("/") == where:
            flags.leave(begin, "no", "slime resumes from where it saves; here the same command resumes")
            where = ""
        elif where == (checkpoint or "").rstrip("/"):
            flags.leave(begin, "no", "training starts from model.hf_checkpoint")
        else:
            flags.note_missing(begin)
            remark = "--load; must exist, where slime begins from --ref-load without it"
            yield Setting(key="trainer.load", value=where, remark=remark)
    if reference is not None and reference.values:
        yield from _reference(flags, reference, checkpoint or "", begins=not where)


def _reference(flags: Flags, given: Given, checkpoint: str, *, begins: bool) -> Iterator[Setting]:
    """Say what the reference is, and with `begins` the weights that training starts from."""
    path = given.values[0].text.rstrip("/")
    plain = path.removesuffix(CONVERTED)
    if checkpoint.rstrip("/") in (plain, path):
        flags.leave(
            given, "no", "a converted copy of --hf-checkpoint: unset, the reference is what training starts from"
        )
    elif begins:
        flags.note_missing(given)
        remark = "--ref-load, from which slime starts without a checkpoint in --load; so is the reference"
        yield Setting(key="trainer.load", value=path, remark=remark)
        yield Setting(key="trainer.load_weights_only", value=True, remark="slime begins with a new optimizer")
    elif is_off(flags, "kl-loss-coef") and is_off(flags, "kl-coef"):
        flags.leave(given, "no", "no reference is needed, since both KL coefficients are 0")
    else:
        flags.note_missing(given)
        remark = "--ref-load; a Hugging Face directory, not slime's converted checkpoint"
        yield Setting(key="model.ref_load", value=plain, remark=remark)


def _data(flags: Flags) -> Iterator[Setting]:
    path = flags.text("prompt-data")
    if path is not None:
        yield Setting(key="data.0.name", value=_name(path), remark="")
        yield Setting(key="data.0.path", value=path, remark="--prompt-data")
    if (given := flags.take("rm-type")) is not None and given.values:
        yield from _grader(flags, given, "data.0.rm_type")
    yield from _function(flags, "custom-rm-path", "data.0.rm_type")


def _function(flags: Flags, flag: str, key: str) -> Iterator[Setting]:
    """Write a function of the user into the recipe as it is. Those of slime itself need slime."""
    given = flags.take(flag)
    if given is None or not given.values:
        return
    path = given.values[0].text
    if path == f"{HUB}check_reward_nonzero_std":
        yield Setting(key=key, value="nonzero_std", remark=f"--{flag}")
        return
    if not FUNCTION.fullmatch(path) or path.startswith("slime."):
        flags.leave(given, "by hand", f"{key}: {answer_of(flag).remark}")
        return
    flags.note_missing(given)
    module, _, name = path.rpartition(".")
    yield Setting(key=key, value=f"slime:{module}:{name}", remark=f"--{flag}; needs the PYTHONPATH of the script")


def _tis(flags: Flags) -> Iterator[Setting]:
    """Write the function of importance weights, which slime calls with --use-tis alone."""
    if flags.peek(TIS) is None:
        return
    if flags.peek("use-tis") is None or (whole_number(flags.peek("context-parallel-size")) or 1) > 1:
        on_ranks = "algorithm.tis.function gets whole sequences: trainer.megatron.context_parallel_size must be 1"
        is_off = flags.peek("use-tis") is None
        flags.leave_taken(
            TIS, *(("no", "slime weights nothing without --use-tis") if is_off else ("by hand", on_ranks))
        )
        flags.take(TIS)
        return
    yield from _function(flags, TIS, "algorithm.tis.function")
    if (given := flags.take("custom-config-path")) is not None:
        remark = (
            "the function reads its tis_* and rs_* values from algorithm.tis and rs: docs/reference/slime-functions.md"
        )
        flags.leave(given, "by hand", remark)


def _grader(flags: Flags, given: Given, key: str) -> Iterator[Setting]:
    flags.note_missing(given)
    name = given.values[0].text
    plain = name.removeprefix("boxed_")
    grader = next((grader for grader in from_slime().graders if grader.name == plain), None)
    if grader is None or grader.key is None:
        why = "no grader here has this name" if grader is None else grader.remark
        flags.leave(given, "not yet", why, is_lost=True)
    else:
        yield Setting(key=key, value=name.replace(plain, grader.key), remark=f"--rm-type {name}")


def _batches(flags: Flags) -> Iterator[Setting]:
    """Set optimizer steps per train step, which slime may give as samples per optimizer step."""
    batch = flags.take("global-batch-size")
    if batch is None:
        return
    size, whole = whole_number(batch), _batch_of(flags)
    if flags.peek("num-steps-per-rollout") is not None or size == whole:
        flags.leave(batch, "no", f"follows from other settings: {answer_of('global-batch-size').remark}")
    elif size and whole and whole % size == 0:
        yield Setting(key="algorithm.num_steps_per_rollout", value=whole // size, remark=f"--global-batch-size {size}")
    else:
        flags.leave(
            batch, "by hand", f"does not divide the samples of a train step: {answer_of('global-batch-size').remark}"
        )


def _batch_of(flags: Flags) -> int | None:
    """Return the samples of a train step."""
    groups, samples = whole_number(flags.peek("rollout-batch-size")), flags.peek("n-samples-per-prompt")
    each = 1 if samples is None else whole_number(samples)
    return None if groups is None or each is None else groups * each


def _algorithm(flags: Flags) -> Iterator[Setting]:
    if flags.program == "train_async.py" and flags.peek("debug-train-only") is None:
        yield Setting(key="rollout.max_staleness", value=1, remark="train_async.py: generation is one train step ahead")
    _leave_kl_loss(flags)
    yield from named_choices(flags)
    for flag, key in FUNCTIONS.items():
        yield from _function(flags, flag, key)
    yield from _tis(flags)
    yield from _rollout_function(flags)
    if (given := flags.take("optimizer")) is not None and given.values:
        is_adam = given.values[0].text == "adam"
        flags.leave(given, "no" if is_adam else "not yet", "AdamW always", is_lost=not is_adam)
    if first(flags.peek("loss-type")) == "custom_loss":
        flags.take("loss-type")
        flags.leave_taken("loss-type", "no", "follows from algorithm.loss.function")
    elif (given := flags.take("loss-type")) is not None and given.values:
        if given.values[0].text != "policy_loss":
            loss = given.values[0].text.removesuffix("_loss")
            yield Setting(key="algorithm.loss.type", value=loss, remark="--loss-type")
        tokens = whole_number(flags.peek("max-tokens-per-gpu"))
        if given.values[0].text == "sft_loss" and flags.peek("rollout-max-response-len") is None and tokens:
            tokens *= whole_number(flags.peek("context-parallel-size")) or 1
            remark = "slime has no limit for demonstrations: what fits into a micro-batch"
            yield Setting(key="rollout.max_response_len", value=tokens, remark=remark)
    if first(flags.peek("moe-token-dispatcher-type")) == "flex" and (given := flags.take("moe-token-dispatcher-type")):
        flags.leave(given, "not yet", "tokens reach their experts by all-to-all or all-gather")  # the same numbers
    if (given := flags.take("lr-warmup-fraction")) is not None and given.values:
        yield from _warmup(flags, given)
    if (given := flags.take("update-weight-mode")) is not None and given.values:
        if given.values[0].text == "delta":
            yield Setting(
                key="trainer.full_export_interval", value=4, remark="--update-weight-mode delta; 4 is our choice"
            )
        else:
            flags.leave(given, "no", "every version is written in full by default")
    if (given := flags.take("sequence-parallel")) is not None:
        if whole_number(flags.peek("tensor-model-parallel-size")) in (None, 1):
            flags.leave(given, "no", "has no effect without tensor parallelism")
        else:
            yield Setting(key="trainer.megatron.sequence_parallel", value=True, remark="--sequence-parallel")


def _rollout_function(flags: Flags) -> Iterator[Setting]:
    """Write a rollout function of the user, with whole rounds as its calls. slime's own are settings."""
    given = flags.peek(ROLLOUT_FLAG)
    path = "" if given is None or not given.values else given.values[0].text
    if given is not None and path in (SFT, FULLY_ASYNC, ROLLOUT):
        flags.take(ROLLOUT_FLAG)
        remark = "rollout.max_staleness says how many train steps generation may be ahead; train_async.py's 1 is set"
        if path == FULLY_ASYNC:
            flags.leave(given, "by hand", remark)
        else:
            flags.leave(given, "no", "follows from algorithm.loss.type" if path == SFT else "slime's default")
        return
    found = list(_function(flags, ROLLOUT_FLAG, "rollout.custom_rollout"))
    yield from found
    groups = whole_number(flags.peek("over-sampling-batch-size") or flags.peek("rollout-batch-size"))
    if found and groups and groups > 1:
        yield Setting(key="rollout.custom_rollout_prompts", value=groups, remark="prompt groups of a call: a round")
        if flags.peek("sglang-server-concurrency") is None:
            remark = "slime's default: each sample of a call needs a slot"
            yield Setting(key="engines.policy.concurrency", value=SLOTS, remark=remark)


def _leave_kl_loss(flags: Flags) -> None:
    """Turn the KL loss on only where slime does: here the coefficient alone decides, there --use-kl-loss as well."""
    given = flags.take("use-kl-loss")
    if given is None:
        if not is_off(flags, "kl-loss-coef"):
            flags.take("kl-loss-coef")
            flags.leave_taken("kl-loss-coef", "no", "slime ignores it without --use-kl-loss")
    elif is_off(flags, "kl-loss-coef"):
        why = "has no effect with a coefficient of 0, except for one metric: algorithm.kl.metric_interval"
        flags.leave(given, "no", why)
    else:
        flags.leave(given, "no", "follows from algorithm.kl.loss_coef")


def _warmup(flags: Flags, given: Given) -> Iterator[Setting]:
    """Turn a share of the run into optimizer steps, if the run's length is known."""
    steps, share = whole_number(flags.peek("num-rollout")), number_in(given.values[0].text)
    decay = whole_number(flags.peek("lr-decay-iters"))
    size, whole, per = (
        whole_number(flags.peek("global-batch-size")),
        _batch_of(flags),
        whole_number(flags.peek("num-steps-per-rollout")),
    )
    updates = per or (whole // size if whole and size else 1)
    planned = decay or (None if steps is None else steps * updates)
    if planned is None or share is None:
        flags.leave(given, "by hand", "optimizer.lr_warmup_iters, in optimizer steps")
    else:
        value = round(planned * share)
        remark = f"--lr-warmup-fraction {given.values[0].text} of {planned} optimizer steps"
        yield Setting(key="optimizer.lr_warmup_iters", value=value, remark=remark)


def _evaluation(flags: Flags) -> Iterator[Setting]:
    """Give each evaluation set its own table, with what slime says for all sets."""
    given, config = flags.take("eval-prompt-data"), flags.take("eval-config")
    shared = [flag for flag in _of_evaluation() if flags.peek(flag) is not None]
    if config is not None:
        flags.leave(config, "by hand", answer_of("eval-config").remark)
    words = () if given is None else given.values
    if given is not None and len(words) > 1 and len(words) % 2:
        flags.leave(given, "by hand", "expected pairs of a name and a path")
    pairs = (
        [("eval", words[0])]
        if len(words) == 1
        else [(name.text, path) for name, path in zip(words[::2], words[1::2], strict=False)]
    )
    if given is not None:
        flags.note_missing(given)
    if pairs and flags.peek("eval-interval") is None and given is not None:
        flags.leave(given, "no", "slime does not evaluate without --eval-interval")
        pairs = []
    for number, (name, path) in enumerate(pairs):
        yield Setting(key=f"eval.{number}.name", value=plain_name(name), remark="")
        yield Setting(key=f"eval.{number}.path", value=path.text, remark="--eval-prompt-data")
    for flag in shared:
        one = flags.take(flag)
        if one is None:
            continue
        if not pairs:
            flags.leave(one, "no", "there is no evaluation set")
        if one.flag == "eval-function-path" and first(one) == ROLLOUT:
            yield from _plain_evaluation(flags, one, len(pairs))
            continue
        for number in range(len(pairs)):
            for setting in _plain(flags, one):
                yield msgspec.structs.replace(setting, key=setting.key.replace(EVAL, f"eval.{number}."))


def _plain_evaluation(flags: Flags, given: Given, num_sets: int) -> Iterator[Setting]:
    """Evaluate without the rollout function of the user, if there is one: as slime's default does."""
    if first(flags.peek(ROLLOUT_FLAG)) in (None, ROLLOUT, SFT, FULLY_ASYNC):
        flags.leave(given, "no", "slime's default")
        return
    own = first(flags.peek("custom-generate-function-path"))
    module, _, name = (own or "").rpartition(".")
    value = f"slime:{module}:{name}" if module else ONE_TURN
    for number in range(num_sets):
        yield Setting(key=f"eval.{number}.custom_generate", value=value, remark=f"--{given.flag}")


def _of_evaluation() -> Iterator[str]:
    for flag in from_slime().flags():
        if (flag.key or "").startswith(EVAL) and flag.flag not in ("eval-prompt-data", "eval-config"):
            yield flag.flag


# Flags with one key, or none


def _plain(flags: Flags, given: Given) -> Iterator[Setting]:
    """Convert a flag by its answer in flags.toml."""
    found = find_flag(given.flag) or find_by_rule(given.flag)
    if found is None:
        flags.leave(given, "unknown", "neither slime's nor one that it passes on")
        return
    answer = found.answer
    if answer.key is None:
        is_lost = answer.is_lost([word.text for word in given.values])
        flags.leave(given, answer.state, answer.remark, is_lost=is_lost)
        return
    if answer.value is not None:
        yield Setting(key=answer.key, value=answer.value, remark=f"--{given.flag}")
        return
    if any(FUNCTION.fullmatch(word.text) for word in given.values) and found.flag.endswith("-path"):
        flags.leave(given, "by hand", f"{answer.key}: {answer.remark or 'here such functions take other arguments'}")
        return
    flags.note_missing(given)
    try:
        yield Setting(key=answer.key, value=typed(answer.key, given.values), remark=f"--{given.flag}")
    except WrongValue as error:
        flags.leave(given, "by hand", f"{answer.key}: {error}{f'; {answer.remark}' if answer.remark else ''}")


def _name(path: str) -> str:
    """Return a name for a data file: its own without the ending, in letters, digits and dashes."""
    return plain_name(PurePosixPath(path.partition("@[")[0]).stem)


def plain_name(text: str) -> str:
    """Return a text as a name of letters, digits, dashes and underscores."""
    return (re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_") or "data")[:64]


def _without_twins(settings: Iterable[Setting]) -> list[Setting]:
    """Keep the last setting of each key."""
    return list({setting.key: setting for setting in settings}.values())
