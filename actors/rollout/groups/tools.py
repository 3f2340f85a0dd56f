"""What every group run of a rollout actor works with."""

from dataclasses import dataclass

from actors.rollout.groups.scoring import Scorer
from actors.rollout.requests.sending import Generator
from actors.rollout.requests.served_model import ServedModel
from actors.rollout.sessions.conversation import Conversation, GenerateFunction
from runtime.bus.bus import Bus


@dataclass
class Tools:
    """What every group run works with."""

    bus: Bus
    generator: Generator
    scorer: Scorer
    batch_requests: bool
    seed: int  # run.seed
    custom_generate: GenerateFunction | None  # a user's, in place of one request for each sample
    model: ServedModel  # for what it puts between turns
    failed_reward: float | None  # reward of a sample whose scores all failed; None: the sample fails
    conversations: set[Conversation]  # whose functions run now
