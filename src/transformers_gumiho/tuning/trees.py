"""The trees that compete."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..drafting.settings import DRAFT_TEMPERATURE
from ..model.configuration_gumiho import GumihoConfig


# Drafted tokens and branching factors, from what pays on a slow processor to what pays on a GPU.
SHAPES = ((4, 2), (8, 2), (12, 4), (24, 4), (63, 14))
# Below the default, scores rank nodes more sharply than the drafter's own probabilities. Short drafters often win
# with the default, deep ones with less.
SHARP_TEMPERATURE = 0.3
# Sizes to choose from for further numbers of rows.
NUM_SIZES = 6


@dataclass(frozen=True)
class Tree:
    """
    Decoding settings of a drafter that are tuned; their meanings are those in [`DraftingSettings`].

    Attributes:
        vocabulary: Which tokens may be drafted: the drafter's own list (or all, where it has none), all, or those that
            occur most often in what the target wrote.
    """

    num_assistant_tokens: int
    branching_factor: int
    tree_depth: int
    draft_temperature: float | tuple[float, ...] = DRAFT_TEMPERATURE
    vocabulary: Literal["own", "all", "counted"] = "own"

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a generation config, in numbers and lists, without the vocabulary."""
        given = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        del given["vocabulary"]
        return given


def list_trees(config: GumihoConfig, own: Tree, verifies_chains: bool) -> list[Tree]:
    """
    Returns some sixteen different trees, the drafter's own first.

    Args:
        config: The drafter's.
        own: What the drafter has.
        verifies_chains: Whether the target verifies chains only.
    """
    deepest, shallow = config.max_draft_depth, config.num_serial_tokens
    if verifies_chains:
        return [Tree(depth, 1, depth, own.draft_temperature) for depth in range(1, deepest + 1)]
    trees = [own, Tree(deepest, 1, deepest)]
    for num_tokens, branching in SHAPES:
        trees += [
            # Trees without the parallel heads cost a pass less.
            Tree(num_tokens, branching, min(shallow, num_tokens)),
            Tree(num_tokens, branching, min(deepest, num_tokens)),
            Tree(num_tokens, branching, min(deepest, num_tokens), SHARP_TEMPERATURE),
        ]
    return list(dict.fromkeys(trees))


def list_sizes(winner: Tree) -> list[Tree]:
    """Returns the winner with fewer and fewer drafted tokens: in a larger batch each of them costs more."""
    largest = winner.num_assistant_tokens
    sizes = {round(largest ** (step / (NUM_SIZES - 1))) for step in range(NUM_SIZES)}
    return [replace(winner, num_assistant_tokens=size) for size in sorted(sizes)]
