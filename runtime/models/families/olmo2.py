"""OLMo 2: norms of what each module adds, and one norm of all queries and of all keys."""

from typing import ClassVar

from runtime.models.blocks import NORMS_AFTER
from runtime.models.family import Family
from runtime.models.readers import HeadKeys, MlpKeys


class AttentionKeys(HeadKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    without_keys: ClassVar = {"joint_norms": True}


FAMILY = Family(
    model_type="olmo2",
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    norms=NORMS_AFTER,
)
