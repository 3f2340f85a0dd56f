"""Rules of graders, judges and rewards."""

from collections.abc import Iterator
from typing import Any

from runtime.settings.derived import (
    eval_data,
    needs_baseline,
    reward_keys,
    trains_demonstrations,
)
from runtime.settings.placement import home_node
from runtime.settings.reading.config import Problem
from runtime.settings.tables.estimators import CustomEstimator
from runtime.settings.tables.reward import GraderLimits, JudgeConfig, RewardConfig
from runtime.settings.topology import JUDGE, POLICY, Topology, answers_are_recorded

OWN_FIELDS = ("max_tokens", "messages", "model", "n", "stream", "temperature")  # of a request to a judge
REMOTE_RM = "remote_rm"  # the grader of reward.rm_url
PARSERS = ("number", "boxed")  # of the answers of judges: actors/reward/graders/parsers.py


def grader_problems(topology: Topology) -> Iterator[Problem]:
    """Yield problems of graders, judges and the table `reward`."""
    for rule in (
        _group_graders,
        _named_rewards,
        _external_graders,
        _rewards_per_token,
        _batches,
        _judges,
        _needs_of_graders,
    ):
        yield from rule(topology)


def _group_graders(topology: Topology) -> Iterator[Problem]:
    if not topology.reward.group_rm or not topology.data:
        return
    graders = {item.rm_type for item in topology.data}
    for index, item in enumerate(topology.eval):
        name = eval_data(topology, item).rm_type
        if name in graders and ":" in (name or ""):
            message = "grades whole groups (reward.group_rm), but evaluation grades single samples: name another grader"
            yield Problem.of(f"eval.{index}.rm_type", name, message)


def _named_rewards(topology: Topology) -> Iterator[Problem]:
    """Refuse graders that cannot give what the estimator needs: several rewards, or the reward of a single sample."""
    if trains_demonstrations(topology):
        return
    algorithm, reward = topology.algorithm, topology.reward
    if needs_baseline(algorithm) and reward.group_rm:
        message = 'cannot be combined with algorithm.estimator.type = "remax", whose greedy sample is in no group'
        yield Problem.of("reward.group_rm", True, message)
    keys = reward_keys(algorithm)
    if not keys:
        return
    if reward.reward_key is None:
        message = "needed with algorithm.estimator.reward_keys: the value in the dict that metrics and filters read"
        yield Problem.of("reward.reward_key", None, message)
    for index, item in enumerate(topology.data):
        name = item.rm_type
        parsed = (judge for judge, config in reward.judges.items() if ":" in config.parser)
        sums = (each for each, weights in reward.sums.items() if weights.keys() >= set(keys))
        own = (*reward.graders, *reward.external, *parsed, *sums)
        if name is not None and ":" not in name and name not in (*own, REMOTE_RM):
            needed = "a function of yours that returns a dict, or a sum with these parts"
            message = f"gives no rewards of these names; algorithm.estimator.reward_keys needs {needed}"
            yield Problem.of(f"data[{index}].rm_type", name, message)


def _rewards_per_token(topology: Topology) -> Iterator[Problem]:
    """Refuse rewards per turn or token for estimators that read one reward per sample."""
    per, chosen = topology.reward.per, topology.algorithm.estimator
    if per == "sample" or trains_demonstrations(topology) or chosen.of_tokens or isinstance(chosen, CustomEstimator):
        return
    message = f'"{chosen.type}" reads one reward per sample: let the grader return the sum, or set '
    message += 'algorithm.estimator.type = "ppo", "reinforce_plus_plus" or "custom"'
    yield Problem.of("reward.per", per, message)


def _batches(topology: Topology) -> Iterator[Problem]:
    """Refuse batches of samples for graders that get one sample or a whole prompt group."""
    reward = topology.reward
    for name, limits in reward.limits.items():
        key = f"reward.limits.{name}.batch"
        if limits.batch is None:
            if limits.wait_s != GraderLimits().wait_s:
                yield Problem.of(f"reward.limits.{name}.wait_s", limits.wait_s, f"has no effect unless {key} is set")
        elif name not in reward.graders:
            yield Problem.of(key, limits.batch, "is for functions in reward.graders; a built-in grader gets one sample")
        elif reward.group_rm:
            message = "cannot be combined with reward.group_rm, where one call gets a whole prompt group"
            yield Problem.of(key, limits.batch, message)


def _external_graders(topology: Topology) -> Iterator[Problem]:
    key, external = "reward.external", list(topology.reward.external)
    if not external:
        return
    if len(set(external)) < len(external):
        yield Problem.of(key, external, "names a grader twice")
    if both := [name for name in external if name in topology.reward.graders]:
        yield Problem.of(
            key, external, f"{', '.join(both)} is in reward.graders too: the run's own actors would run it"
        )
    home = home_node(topology)
    if topology.bus.url is None and len(topology.nodes) == 1 and topology.nodes[home].address is None:
        message = f'external workers cannot reach the bus: set nodes.{home}.address to "auto", or to "127.0.0.1" for '
        yield Problem.of(key, external, message + "workers on this machine alone")


def _needs_of_graders(topology: Topology) -> Iterator[Problem]:
    reward = topology.reward
    named = [(f"data.{index}", item.rm_type) for index, item in enumerate(topology.data)]
    named += [(f"eval.{index}", item.rm_type) for index, item in enumerate(topology.eval)]
    for key, name in named:
        if name is not None and (need := unmet_need(name, reward)) is not None:
            yield Problem.of(f"{key}.rm_type", name, need)
    for key, value in (("env", reward.rm_api_key_env), ("file", reward.rm_api_key_file)):
        if value is not None and reward.rm_url is None:
            yield Problem.of(f"reward.rm_api_key_{key}", value, "has no effect without reward.rm_url")
    if reward.rm_api_key_env is not None and reward.rm_api_key_file is not None:
        message = "contradicts reward.rm_api_key_env; set one of them"
        yield Problem.of("reward.rm_api_key_file", reward.rm_api_key_file, message)


def unmet_need(name: str, reward: RewardConfig) -> str | None:
    """Return which setting a built-in grader needs and does not have; None if it can be used."""
    if name == REMOTE_RM and reward.rm_url is None:
        return "needs reward.rm_url, the server that it asks"
    if name == REMOTE_RM and reward.sandbox == "isolated":
        return 'cannot be combined with reward.sandbox = "isolated", which has no network'
    if name.removeprefix("boxed_") == "code" and reward.sandbox != "isolated":
        # The run's data files, with the right outputs, are hidden from its graders only then
        return 'needs reward.sandbox = "isolated": it runs programs that the model writes'
    return None


def _judges(topology: Topology) -> Iterator[Problem]:
    reward = topology.reward
    for name, judge in reward.judges.items():
        key = f"reward.judges.{name}"
        if name in reward.graders or name in reward.external:
            where = "reward.graders" if name in reward.graders else "reward.external"
            yield Problem(key=key, message=f"{where} has a grader of this name too: use another name")
        yield from _server_of_judge(topology, judge, key)
        yield from _request_of_judge(judge, key)
    graded = [(f"data.{index}", item.rm_type) for index, item in enumerate(topology.data)]
    graded += [(f"eval.{index}", item.rm_type) for index, item in enumerate(topology.eval)]
    for key, name in graded:
        if name in reward.judges and reward.judges[name].template is None:
            message = f"this judge scores no samples: set reward.judges.{name}.template"
            yield Problem.of(f"{key}.rm_type", name, message)


def _server_of_judge(topology: Topology, judge: JudgeConfig, key: str) -> Iterator[Problem]:
    if judge.url is None:
        pool = judge.pool or JUDGE
        for name in ("model", "api_key_env", "api_key_file"):
            if getattr(judge, name) is not None:
                yield Problem.of(f"{key}.{name}", getattr(judge, name), f"has no effect without {key}.url")
        if pool == POLICY:
            message = "is the pool of the model that is trained; a judge has a pool of its own"
            yield Problem.of(f"{key}.pool", pool, message)
        elif pool not in topology.engines and not answers_are_recorded(topology):
            own = ", ".join(name for name in topology.engines if name != POLICY) or "none yet"
            message = f"missing: the engines of this judge, engines.{pool}; or a URL ({key}.url). Pools: {own}"
            yield Problem(key=f"{key}.pool", message=message)
        return
    if judge.pool is not None:
        yield Problem.of(f"{key}.pool", judge.pool, f"contradicts {key}.url; set one of them")
    if judge.model is None:
        yield Problem(key=f"{key}.model", message=f"missing: the name of the model on the server of {key}.url")
    if judge.api_key_env is not None and judge.api_key_file is not None:
        yield Problem.of(f"{key}.api_key_file", judge.api_key_file, f"contradicts {key}.api_key_env; set one of them")


def _request_of_judge(judge: JudgeConfig, key: str) -> Iterator[Problem]:
    if judge.template is not None and "{response}" not in judge.template:
        yield Problem.of(f"{key}.template", judge.template, 'lacks "{response}": the judge would not see the sample')
    for name in sorted(judge.extra_body):
        if name in OWN_FIELDS:
            why = (
                f"the run sets this field; set {key}.{name}" if name in ("temperature", "max_tokens") else "not allowed"
            )
            yield Problem.of(f"{key}.extra_body.{name}", judge.extra_body[name], why)
    stop: Any = judge.extra_body.get("stop")
    if stop == "" or (isinstance(stop, list) and "" in stop):
        message = "an empty stop text ends each answer at its first token"
        yield Problem.of(f"{key}.extra_body.stop", judge.extra_body["stop"], message)
    if judge.parser not in PARSERS and ":" not in judge.parser:
        allowed = f"allowed: {', '.join(PARSERS)}, module:function, path/file.py:function"
        yield Problem.of(f"{key}.parser", judge.parser, allowed)
