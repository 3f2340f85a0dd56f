"""The recipe: its tables say what is trained. Keys that exist in slime keep slime's name."""

from runtime.settings.reading.config import Config
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.tables.prompts import DataConfig, EvalConfig
from runtime.settings.tables.rollout import RolloutConfig
from runtime.settings.tables.training import CriticConfig, ModelConfig, OptimizerConfig, TrainConfig


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
