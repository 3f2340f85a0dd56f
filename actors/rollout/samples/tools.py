"""The shared dependencies of all group runs of a rollout actor."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.rollout.pools.answering import AnsweringPool, AnsweringPools
from actors.rollout.pools.columns import PoolsOf, no_pools
from actors.rollout.requests.sending import Generator
from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.evaluation_function import EvaluationFunction
from actors.rollout.samples.failures import Action, FailurePolicy
from actors.rollout.samples.function_outcomes import FunctionOutcomes
from actors.rollout.samples.generate_function import KeyedFunction
from actors.rollout.samples.held import Episodes
from actors.rollout.samples.rollout_function import RolloutCalls, RolloutFunction
from actors.rollout.samples.scoring import Scorer
from actors.rollout.sglang.served_model import ServedModel
from runtime.bus.bus import Bus
from runtime.settings.tables.reward import RewardPer, SampleField


@dataclass
class GroupDependencies:
    """The shared dependencies of group runs."""

    bus: Bus
    generator: Generator
    scorer: Scorer
    batch_requests: bool
    seed: int  # run.seed
    custom_generate: KeyedFunction | None  # user-defined function in place of one request per sample
    model: ServedModel  # checks and encodes the input between turns
    policy: FailurePolicy  # what a sample does whose score failed
    outcomes: FunctionOutcomes  # of the calls of generate functions
    reward_keys: tuple[str, ...]  # names of the rewards that a training sample's score must hold
    conversations: set[Conversation]  # conversations with a running function
    episodes: Episodes | None = None  # functions that live over halts; None: halted groups do not go on
    eval_generate: Mapping[str, KeyedFunction] = field(default_factory=dict[str, KeyedFunction])  # by set
    eval_functions: Mapping[str, EvaluationFunction] = field(default_factory=dict[str, EvaluationFunction])  # by set
    prompt_first: bool = False  # engines find the prompt of a group in their cache, if one request came before
    on_exception: Action = "drop_sample"  # what a training sample does whose generate function failed
    custom_rollout: RolloutFunction | None = None  # user-defined function for all samples of a group
    rollout_calls: RolloutCalls = field(default_factory=RolloutCalls)  # of that function
    reward_per: RewardPer = "sample"  # what a list of rewards of one sample is for
    sample_fields: tuple[SampleField, ...] = ()  # of a sample, that graders get in addition
    function_limit_s: float = 300.0  # of a generate function, outside of `generate`
    function_pools: AnsweringPools = field(default_factory=dict[str, AnsweringPool])  # for turns of generate functions
    pools_of: PoolsOf = no_pools  # the pools that compute columns of the samples of a data source

    def generate_function(self, eval_set: str | None) -> KeyedFunction | None:
        """The function of training samples (None), or that of an evaluation set."""
        return self.eval_generate.get(eval_set or "", self.custom_generate)

    def rollout_function(self, eval_set: str | None) -> RolloutFunction | None:
        """The function for all samples of a group. Evaluation sets with a function of their own have none."""
        has_own = eval_set is not None and (eval_set in self.eval_generate or eval_set in self.eval_functions)
        return None if has_own else self.custom_rollout
