"""The recipe: its tables say what is trained. Keys that exist in slime keep slime's name."""

from runtime.settings.reading.access import Harmless
from runtime.settings.reading.config import Config
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.tables.prompts import DataConfig, EvalConfig
from runtime.settings.tables.rollout import RolloutConfig
from runtime.settings.tables.training import CriticConfig, ModelConfig, OptimizerConfig, TrainConfig
from runtime.settings.tables.values import Text


class Recipe(Config, frozen=True, kw_only=True):
    """All settings that decide what is learnt. Where it runs is in the topology."""

    model: ModelConfig
    # At least one is needed.
    data: tuple[DataConfig, ...]
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    train: TrainConfig
    eval: tuple[EvalConfig, ...] = ()
    # Flags of a start script that `bin/from-slime --force` left out although the run is another one without them, each
    # with what is lost. A start is refused while one is here: delete the line once the run may go without that flag.
    not_converted: Harmless[dict[str, Text]] = {}
