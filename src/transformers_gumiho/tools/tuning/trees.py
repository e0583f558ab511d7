"""The trees that compete."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from ...model.configuration_gumiho import GumihoConfig
from ...model.decoding_settings import DRAFT_TEMPERATURE


# Drafted tokens and branching factors, from small trees for slow processors to large ones for GPUs.
_SHAPES = ((4, 2), (8, 2), (12, 4), (24, 4), (63, 14))
# Maximum number of drafted tokens in trees that have only serial tokens, or half of a block.
_MAX_SHALLOW = 12
# Depths of drafters without parallel heads: each level takes a pass.
_SERIAL_DEPTHS = (3, 5, 8)
# Favors probable nodes more than the default does.
_SHARP_TEMPERATURE = 0.3
# Sizes that compete for each further number of rows.
_NUM_SIZES = 5


@dataclass(frozen=True)
class Tree:
    """
    The decoding settings that are tuned; see [`DraftingSettings`] for their meanings.

    Attributes:
        drafts_all_tokens: Whether a drafter that has a draft vocabulary drafts all tokens instead.
    """

    num_assistant_tokens: int
    branching_factor: int
    tree_depth: int
    draft_temperature: float | tuple[float, ...] = DRAFT_TEMPERATURE
    drafts_all_tokens: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """These settings as fields of a generation config."""
        settings = asdict(self)
        return settings | ({"draft_vocabulary": None} if settings.pop("drafts_all_tokens") else {})


def list_trees(config: GumihoConfig, own: Tree, verifies_chains: bool) -> list[Tree]:
    """
    Returns some fifteen trees, the drafter's own first, with two temperatures: some ten where its own are calibrated.
    For a target that verifies chains only, returns one chain of each depth.
    """
    deepest = config.max_draft_depth
    # Without the parallel heads a cycle has one pass less. A block drafter runs half of its block instead.
    shallow = config.num_serial_tokens or max(deepest // 2, 1)
    if verifies_chains:
        depths = sorted(range(1, deepest + 1), key=lambda depth: depth != own.tree_depth)
        return [replace(own, num_assistant_tokens=d, branching_factor=1, tree_depth=d) for d in depths]
    temperatures: list[float | tuple[float, ...]] = [DRAFT_TEMPERATURE, _SHARP_TEMPERATURE]
    if isinstance(own.draft_temperature, tuple):  # calibrated
        temperatures = [own.draft_temperature]
    usual = temperatures[0]
    trees = [own, Tree(deepest, 1, deepest, usual)]
    if config.drafts_serially:
        for depth in sorted({min(depth, deepest) for depth in _SERIAL_DEPTHS}):
            shapes = [(depth, 1, depth), *((size, width, min(depth, size)) for size, width in _SHAPES)]
            trees += [Tree(*shape, usual) for shape in shapes]
    else:
        for size, width in _SHAPES:
            trees += [Tree(size, width, min(deepest, size), temperature) for temperature in temperatures]
            trees += [Tree(size, width, min(shallow, size), usual)] if size <= _MAX_SHALLOW else []
    return list(dict.fromkeys(trees))


def list_sizes(winner: Tree) -> list[Tree]:
    """Returns the winner and smaller trees of its shape."""
    largest = winner.num_assistant_tokens
    sizes = {round(largest ** (step / (_NUM_SIZES - 1))) for step in range(_NUM_SIZES)}
    return [replace(winner, num_assistant_tokens=size) for size in sorted(sizes)]
