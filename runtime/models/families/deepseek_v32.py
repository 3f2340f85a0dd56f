"""DeepSeek-V3.2: multi-latent attention to the keys that an indexer chooses, and experts of a sigmoid router."""

from runtime.models.expert_readers import TypedExpertKeys
from runtime.models.family import Family
from runtime.models.sparse_readers import SparseKeys

FAMILY = Family(
    model_type="deepseek_v32",
    title="DeepSeek-V3.2-Exp, DeepSeek-V3.2",
    architecture="DeepseekV32ForCausalLM",
    attention=SparseKeys,
    mlp=TypedExpertKeys,
)
