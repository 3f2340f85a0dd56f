"""Recipe rules: impossible combinations, and settings without effect."""

from collections.abc import Iterator
from typing import get_args

import msgspec

from runtime.bus.limits import MAX_EVENT_BYTES
from runtime.functions.load import is_plugin, project_of
from runtime.settings.derived import (
    MIX_BLOCK,
    max_prompt_len,
    needs_baseline,
    over_sampling_batch_size,
    trains_demonstrations,
    trains_pairs,
    trains_reward_model,
    truncates,
)
from runtime.settings.reading.config import Problem, type_of
from runtime.settings.recipe import Recipe
from runtime.settings.rules.algorithm import algorithm_problems
from runtime.settings.sizes import growing_events, show_bytes
from runtime.settings.tables.algorithm import RolloutMean
from runtime.settings.tables.losses import Loss
from runtime.settings.tables.prompts import EvalConfig

OF_SAMPLES = (  # keys of an evaluation set that have no meaning for preference pairs
    "n_samples_per_eval_prompt",
    "temperature",
    "top_p",
    "top_k",
    "max_response_len",
    "label_key",
    "rm_type",
    "custom_generate",
    "custom_evaluation",
    "custom_metrics",
)
MAX_KEPT = 4096  # tokens that SGLang lists of one token: its default of --sampling-mask-max-tokens
EVENT_ROOM_BYTES = 64 << 10  # for the parts of an event that do not grow


def recipe_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield all problems of a recipe."""
    rules = (
        _not_converted,
        _batches,
        _collection,
        _sources,
        _weights,
        _lengths,
        _sampling,
        algorithm_problems,
        _demonstrations,
        _pairs,
        _masks,
        _weight_updates,
        _schedule,
        _names,
        _template_arguments,
        _evaluation,
        _events,
    )
    for rule in rules:
        yield from rule(recipe)


def _not_converted(recipe: Recipe) -> Iterator[Problem]:
    for flag, lost in recipe.not_converted.items():
        message = f"is not followed: {lost}; delete this line of [not_converted] once the run may go without it"
        yield Problem(key=f"not_converted.{flag}", message=message)


def _batches(recipe: Recipe) -> Iterator[Problem]:
    rollout, steps = recipe.rollout, recipe.algorithm.num_steps_per_rollout
    batch, requested = rollout.rollout_batch_size, rollout.over_sampling_batch_size
    if not recipe.data:
        yield Problem(key="data", message="at least one [[data]] table is needed")
    if requested is not None and requested < batch:
        message = f"must be at least rollout.rollout_batch_size, which is {batch}"
        yield Problem.of("rollout.over_sampling_batch_size", requested, message)
    num_samples = batch * rollout.n_samples_per_prompt
    if num_samples % steps:
        message = (
            f"must divide the number of samples in a batch, rollout_batch_size x n_samples_per_prompt = {num_samples}"
        )
        yield Problem.of("algorithm.num_steps_per_rollout", steps, message)


def _collection(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of filters and refills that would have no effect, or no end."""
    rollout = recipe.rollout
    if rollout.over_sampling_filter is not None and over_sampling_batch_size(rollout) == rollout.rollout_batch_size:
        message = "has nothing to choose from unless rollout.over_sampling_batch_size is above rollout_batch_size"
        yield Problem.of("rollout.over_sampling_filter", rollout.over_sampling_filter, message)
    if rollout.keep_when_insufficient and rollout.dynamic_filter is None:
        yield Problem.of("rollout.keep_when_insufficient", True, "has no effect without rollout.dynamic_filter")
    if rollout.filter_fields and not is_plugin(rollout.dynamic_filter or ""):
        message = "has no effect without a function of yours as rollout.dynamic_filter"
        yield Problem.of("rollout.filter_fields", list(rollout.filter_fields), message)
    barren = rollout.dynamic_filter == "nonzero_std" and rollout.n_samples_per_prompt == 1
    if barren and not rollout.keep_when_insufficient:
        message = "drops every group of one sample, whose rewards do not differ: use at least 2"
        yield Problem.of("rollout.n_samples_per_prompt", 1, message)
    if rollout.buffer_filter != "fifo" and rollout.on_halt == "drop":
        yield Problem.of("rollout.buffer_filter", rollout.buffer_filter, 'has no effect with rollout.on_halt = "drop"')
    stale = rollout.max_token_staleness
    if stale is not None and stale < rollout.max_staleness:
        message = f"is below rollout.max_staleness = {rollout.max_staleness}: whole batches would be too stale to train"
        yield Problem.of("rollout.max_token_staleness", stale, message)
    if rollout.custom_rollout is not None and needs_baseline(recipe.algorithm):
        message = 'does not generate the greedy sample of algorithm.estimator.type = "remax"'
        yield Problem.of("rollout.custom_rollout", rollout.custom_rollout, message)
    generate, project = rollout.custom_generate, project_of(rollout.custom_rollout or "")
    if project is not None and generate is not None and project_of(generate) != project:
        message = f"must be a function of {project} too, which the rollout function of {project} calls"
        yield Problem.of("rollout.custom_generate", generate, message)
    if rollout.agent.adapter is not None and not rollout.agent.command:
        message = "needs rollout.agent.command: a Python interpreter that has the package, and arguments"
        yield Problem.of("rollout.agent.adapter", rollout.agent.adapter, message)
    for key in ("custom_generate", "custom_rollout") if rollout.agent.command else ():
        if (name := getattr(rollout, key)) is not None:
            yield Problem.of(f"rollout.{key}", name, "has no effect with rollout.agent: leave one of them out")
    for index, item in enumerate(recipe.data if rollout.agent.command else ()):
        if item.apply_chat_template:
            message = "with rollout.agent, programs get prompts as they are in the data: leave it out"
            yield Problem.of(f"data.{index}.apply_chat_template", True, message)
    number, most = rollout.custom_rollout_prompts, over_sampling_batch_size(rollout)
    if number > 1 and rollout.custom_rollout is None:
        yield Problem.of("rollout.custom_rollout_prompts", number, "has no effect without rollout.custom_rollout")
    if number > most:
        yield Problem.of("rollout.custom_rollout_prompts", number, f"is above the {most} prompt groups of a round")
    if not rollout.eval_overlap and not recipe.eval:
        yield Problem.of("rollout.eval_overlap", False, "has no effect without an [[eval]] table")


def _sources(recipe: Recipe) -> Iterator[Problem]:
    for index, item in enumerate(recipe.data):
        key = f"data.{index}"
        places = {"path": item.path, "source": item.source, "source_class": item.source_class}
        given = [name for name, value in places.items() if value is not None]
        if not given:
            message = f"missing: a data file; or {key}.source, a function; or {key}.source_class, a class"
            yield Problem(key=f"{key}.path", message=message)
        if item.files and item.source_class is None:
            yield Problem.of(f"{key}.files", item.files, f"has no effect without {key}.source_class")
        if item.continue_final_message and trains_demonstrations(recipe):
            message = "has no effect: the last message of a demonstration is its response"
            yield Problem.of(f"{key}.continue_final_message", True, message)
        if not given or given == ["path"]:
            continue
        own = f"{key}.{given[-1]}"
        if len(given) > 1:
            message = f"{key}.{given[0]} is set too; allowed: one of a file, a function and a class"
            yield Problem.of(own, places[given[-1]], message)
        if len(recipe.data) > 1:
            message = "must be the only data source: sources are mixed by their lengths, and this one has none"
            yield Problem.of(own, places[given[-1]], message)
        if recipe.rollout.shuffle:
            message = f"has no effect on {own}, which is called with 0, 1, 2, ... in order"
            yield Problem.of("rollout.shuffle", recipe.rollout.shuffle, message)


def _weights(recipe: Recipe) -> Iterator[Problem]:
    weights = [item.weight for item in recipe.data]
    given = [weight for weight in weights if weight is not None]
    if not given:
        return
    for index, weight in enumerate(weights):
        key = f"data.{index}.weight"
        if weight is None:
            yield Problem(key=key, message="missing: another source has a weight, so all need one")
        elif len(weights) == 1:
            yield Problem.of(key, weight, "has no effect on the only data source")
        elif weight / sum(given) < 1 / MIX_BLOCK:
            yield Problem.of(key, weight, f"is below a thousandth of the sum of weights, {sum(given):g}")
    if recipe.train.num_epoch is not None:
        message = "sources with weights have no common epoch; set train.num_steps"
        yield Problem.of("train.num_epoch", recipe.train.num_epoch, message)


def _lengths(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    context = rollout.max_context_len
    if context is not None and (rollout.max_prompt_len or 1) >= context:
        message = f"leaves no room for a response in rollout.max_context_len = {context}"
        yield Problem.of("rollout.max_prompt_len", max_prompt_len(rollout), message)


def _sampling(recipe: Recipe) -> Iterator[Problem]:
    tables = [("rollout", recipe.rollout.top_k), *((f"eval.{i}", item.top_k) for i, item in enumerate(recipe.eval))]
    for table, top_k in tables:
        if top_k == 0:
            yield Problem.of(f"{table}.top_k", top_k, "no token could be sampled; allowed: -1 (off), or at least 1")
    yield from _sampling_masks(recipe)


def _sampling_masks(recipe: Recipe) -> Iterator[Problem]:
    rollout, key = recipe.rollout, "rollout.return_sampling_mask"
    if not rollout.return_sampling_mask:
        return
    if trains_demonstrations(recipe):
        loss = recipe.algorithm.loss.type
        yield Problem.of(key, True, f'has no effect with algorithm.loss.type = "{loss}": nothing is sampled')
    elif not truncates(rollout):
        yield Problem.of(key, True, "has no effect unless rollout.top_p is below 1 or rollout.top_k is at least 2")
    elif not 2 <= rollout.top_k <= MAX_KEPT:
        why = "leaves one token, whose log-prob is always 0" if rollout.top_k == 1 else "keeps too many tokens to list"
        message = f"{why}; with rollout.return_sampling_mask = true, allowed: 2 to {MAX_KEPT}"
        yield Problem.of("rollout.top_k", rollout.top_k, message)


def _demonstrations(recipe: Recipe) -> Iterator[Problem]:
    if not trains_demonstrations(recipe):
        return
    rollout, algorithm = recipe.rollout, recipe.algorithm
    why = f'with algorithm.loss.type = "{algorithm.loss.type}"'
    if rollout.n_samples_per_prompt > 1:
        message = f"must be 1 {why}: a demonstration is one sample"
        yield Problem.of("rollout.n_samples_per_prompt", rollout.n_samples_per_prompt, message)
    if rollout.temperature != 1:
        message = f"must be 1 {why}: the loss is computed at temperature 1"
        yield Problem.of("rollout.temperature", rollout.temperature, message)
    if rollout.dynamic_filter is not None:
        message = f"has no effect {why}: demonstrations have no reward"
        yield Problem.of("rollout.dynamic_filter", rollout.dynamic_filter, message)
    if rollout.over_sampling_filter is not None:
        message = f"has no effect {why}: demonstrations have no reward"
        yield Problem.of("rollout.over_sampling_filter", rollout.over_sampling_filter, message)
    if rollout.on_surplus != "train":
        message = f'would drop demonstrations {why}; allowed: "train"'
        yield Problem.of("rollout.on_surplus", rollout.on_surplus, message)
    if not rollout.eval_overlap and trains_pairs(recipe):
        message = f"has no effect {why}: nothing is trained during an evaluation"
        yield Problem.of("rollout.eval_overlap", False, message)
    without_effect = (
        "kl.loss_coef",
        "kl.reward_coef",
        "kl.metric_interval",
        "entropy_coef",
        "use_routing_replay",
        "use_rollout_routing_replay",
    )
    for key in without_effect:
        if value := getattr(algorithm.kl if key.startswith("kl.") else algorithm, key.removeprefix("kl.")):
            yield Problem.of(f"algorithm.{key}", value, f"has no effect {why}")
    if trains_pairs(recipe):
        if not isinstance(algorithm.reduction, RolloutMean):
            message = f"must be unset {why}: the loss is the mean over pairs"
            yield Problem.of("algorithm.reduction.type", algorithm.reduction.type, message)
    for index, item in enumerate(recipe.eval):
        if trains_pairs(recipe):
            yield from _held_out(item, f"eval.{index}", why)
            continue
        message = f"not possible {why}, which runs no engine: evaluate the exported model (train.save_hf)"
        yield Problem.of(f"eval.{index}.name", item.name, message)


def _held_out(item: EvalConfig, key: str, why: str) -> Iterator[Problem]:
    """Yield settings of sampling and grading in an evaluation set of preference pairs."""
    for field in msgspec.structs.fields(EvalConfig):
        if field.name in OF_SAMPLES and (value := getattr(item, field.name)) != field.default:
            yield Problem.of(f"{key}.{field.name}", value, f"has no effect {why}: nothing is sampled and graded")


def _pairs(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the columns of preference pairs, and of settings of their losses."""
    algorithm = recipe.algorithm
    named = " or ".join(f'"{type_of(loss)}"' for loss in get_args(Loss) if loss.learns_from == "pairs")
    if trains_reward_model(recipe) and (hook := recipe.train.custom_megatron_before_log_prob_hook) is not None:
        message = 'has no effect with algorithm.loss.type = "rm": a reward model has no log-probs'
        yield Problem.of("train.custom_megatron_before_log_prob_hook", hook, message)
    for index, data in enumerate(recipe.data):
        for key in ("chosen_key", "rejected_key"):
            value = getattr(data, key)
            if trains_pairs(recipe) and value is None:
                why = f'with algorithm.loss.type = "{algorithm.loss.type}"'
                message = f"is needed {why}: the column of a response of each pair"
                yield Problem(key=f"data.{index}.{key}", message=message)
            elif not trains_pairs(recipe) and value is not None:
                message = f"has no effect unless algorithm.loss.type = {named}"
                yield Problem.of(f"data.{index}.{key}", value, message)


def _masks(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    if rollout.stale_tokens == "mask" and rollout.max_token_staleness is None:
        message = "has no effect without rollout.max_token_staleness, which sets the age to mask from"
        yield Problem.of("rollout.stale_tokens", rollout.stale_tokens, message)
    never_resumed = rollout.on_halt != "resume" and rollout.on_weight_update == "drain"
    if rollout.mask_off_policy and never_resumed and rollout.custom_generate is None:
        message = (
            f'has no effect with rollout.on_halt = "{rollout.on_halt}" and rollout.on_weight_update = "drain": '
            "each sample is then generated by one weight version"
        )
        yield Problem.of("rollout.mask_off_policy", True, message)


def _weight_updates(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    if rollout.on_weight_update != "drain" and not rollout.max_staleness:
        message = "has no effect with rollout.max_staleness = 0: no request runs during a weight update"
        yield Problem.of("rollout.on_weight_update", rollout.on_weight_update, message)


def _schedule(recipe: Recipe) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    planned = recipe.train.num_steps * recipe.algorithm.num_steps_per_rollout
    yield from _length(recipe)
    if optimizer.min_lr > optimizer.lr:
        yield Problem.of("optimizer.min_lr", optimizer.min_lr, f"is above optimizer.lr = {optimizer.lr}")
    decays = optimizer.lr_decay_style != "constant" and bool(optimizer.lr_decay_iters or planned)
    if decays and optimizer.lr_warmup_iters >= (optimizer.lr_decay_iters or planned):
        message = f"must end before the decay does, after {optimizer.lr_decay_iters or planned} optimizer steps"
        yield Problem.of("optimizer.lr_warmup_iters", optimizer.lr_warmup_iters, message)


def _length(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    if not train.num_steps and train.num_epoch is None:
        message = "the run has no length: set this or train.num_epoch to 1 or more"
        yield Problem.of("train.num_steps", 0, message)
    if train.num_steps and train.num_epoch is not None:
        message = f"train.num_steps = {train.num_steps} also sets the length of the run; unset one of them"
        yield Problem.of("train.num_epoch", train.num_epoch, message)
    if train.num_epoch is not None and any(
        item.source is not None or item.source_class is not None for item in recipe.data
    ):
        message = "a function or a class as data source has no length; set train.num_steps"
        yield Problem.of("train.num_epoch", train.num_epoch, message)


def _names(recipe: Recipe) -> Iterator[Problem]:
    for table, items in (("data", recipe.data), ("eval", recipe.eval)):
        seen: set[str] = set()
        for index, item in enumerate(items):
            if item.name in seen:
                yield Problem.of(f"{table}.{index}.name", item.name, f"another [[{table}]] table has this name")
            seen.add(item.name)


def _evaluation(recipe: Recipe) -> Iterator[Problem]:
    for index, item in enumerate(recipe.eval):
        yield from _evaluation_set(recipe, item, f"eval.{index}")


def _template_arguments(recipe: Recipe) -> Iterator[Problem]:
    for table, items in (("data", recipe.data), ("eval", recipe.eval)):
        for index, item in enumerate(items):
            if value := (item.apply_chat_template_kwargs or {}).get("continue_final_message"):
                key = f"{table}.{index}.apply_chat_template_kwargs.continue_final_message"
                message = f"is no argument of a template; set {table}.{index}.continue_final_message = true instead"
                yield Problem.of(key, value, message)


def _evaluation_set(recipe: Recipe, item: EvalConfig, key: str) -> Iterator[Problem]:
    context = recipe.rollout.max_context_len
    if item.max_response_len is not None and context is not None and item.max_response_len >= context:
        message = f"leaves no room for a prompt in rollout.max_context_len = {context}"
        yield Problem.of(f"{key}.max_response_len", item.max_response_len, message)


def _events(recipe: Recipe) -> Iterator[Problem]:
    """Yield settings that could make an event larger than the maximum event size."""
    for event in growing_events(recipe):
        most = (MAX_EVENT_BYTES - EVENT_ROOM_BYTES) // event.each_bytes
        if event.number > most:
            size = show_bytes(event.number * event.each_bytes)
            message = f"could make an event ({event.events}) of {size}, over the limit of {show_bytes(MAX_EVENT_BYTES)}"
            yield Problem.of(event.key, event.number, f"{message}; allowed: at most {most}")
