"""CI trains every way to share the work, every two of them together, and each with every form of a micro-batch."""

from collections.abc import Iterable
from itertools import combinations

from tests.grid.rows import ALL, FEW, LAYOUTS, LAYOUTS_OF_EXPERTS, Layout, Row

SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
}
FORMS = ("packed", "tied", "recompute", "is_half")
FEATURES = (
    "replay",
    "told",
    "mtp",
    "ahead",
    "spoilt",
    "kept",
    "aged",
    "idle",
    "prompts",
    "critic",
    "critic_on",
    "lora",
)
# kinds of the same blocks as others in CI, or of blocks that no layout has code for; ministral3 has some under CP
# alone, and indexers of sparse attention under SP
NIGHTLY_KINDS = (
    *(
        "deepseek_v32",
        "dots1",
        "ernie4_5_moe",
        "exaone4",
        "gemma3_text",
        "gemma4_text, dense",
        "glm_moe_dsa",
        "minimax_m2",
    ),
    *("ministral3", "olmo3", "phi3", "smollm3"),
)
ONLY_NIGHTLY = {("DP", "SP")}  # each beside tensor parallelism in CI: together they have no code of their own


def sharing(layout: Layout) -> set[str]:
    """How ranks share the work."""
    sizes = {name: layout.megatron.get(key, 1) for name, key in SIZES.items()}
    found = {name for name, size in sizes.items() if size > 1}
    found |= {"SP"} if layout.megatron.get("sequence_parallel") else set()
    found |= {"DP"} if layout.world > sizes["TP"] * sizes["PP"] * sizes["CP"] else set()
    found |= {"DO"} if layout.optimizer else set()
    return found | ({"overlapped"} if layout.ddp else set())


def traits(row: Row) -> set[str]:
    """What a row trains with, in two parts: what shares the work, and all else."""
    layouts = LAYOUTS | LAYOUTS_OF_EXPERTS
    found = sharing(layouts[row.layout]) | (sharing(layouts[row.critic_on]) if row.critic_on else set())
    found |= {name for name in (*FORMS, *FEATURES) if getattr(row, name)}
    found |= {"recompute"} if "recompute_granularity" in layouts[row.layout].megatron else set()
    return found | {name for name in (row.kind, row.balance) if name}


def pairs(rows: Iterable[Row]) -> set[tuple[str, str]]:
    """All two of a row's traits that are a way to share the work, or a form with anything."""
    found = {pair for row in rows for pair in combinations(sorted(traits(row)), 2)}
    ways = {*SIZES, "SP", "DP", "DO", "overlapped"}
    return {pair for pair in found if ways.issuperset(pair) or not set(FORMS).isdisjoint(pair)}


def of_ci() -> list[Row]:
    """The rows of the kinds of models that CI trains."""
    return [row for row in ALL if row.kind not in NIGHTLY_KINDS]


def test_ci_trains_each_two_ways_to_share_the_work_and_each_form_with_each() -> None:
    assert pairs(of_ci()) - pairs(FEW) == ONLY_NIGHTLY


def test_ci_trains_every_feature_and_kind_of_model_on_several_ranks() -> None:
    shared = [row for row in FEW if row.world > 1]
    assert set().union(*map(traits, of_ci())) - set().union(*map(traits, shared)) == set()
