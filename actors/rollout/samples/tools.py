"""The shared dependencies of all group runs of a rollout actor."""

from dataclasses import dataclass

from actors.rollout.pools.columns import PoolsOf, no_pools
from actors.rollout.requests.sending import Generator
from actors.rollout.samples.conversation import Conversation, GenerateFunction
from actors.rollout.samples.failures import FailurePolicy
from actors.rollout.samples.scoring import Scorer
from actors.rollout.sglang.served_model import ServedModel
from runtime.bus.bus import Bus
from runtime.settings.topology import RewardPer, SampleField


@dataclass
class GroupDependencies:
    """The shared dependencies of group runs."""

    bus: Bus
    generator: Generator
    scorer: Scorer
    batch_requests: bool
    seed: int  # run.seed
    custom_generate: GenerateFunction | None  # user-defined function in place of one request per sample
    model: ServedModel  # checks and encodes the input between turns
    policy: FailurePolicy  # what a sample does whose score failed
    reward_keys: tuple[str, ...]  # names of the rewards that a training sample's score must hold
    conversations: set[Conversation]  # conversations with a running function
    reward_per: RewardPer = "sample"  # what a list of rewards of one sample is for
    sample_fields: tuple[SampleField, ...] = ()  # of a sample, that graders get in addition
    pools_of: PoolsOf = no_pools  # the pools that compute columns of the samples of a data source
