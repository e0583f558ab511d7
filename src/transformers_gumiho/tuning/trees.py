"""The trees that compete."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..drafting.settings import DRAFT_TEMPERATURE
from ..model.configuration_gumiho import GumihoConfig


# Drafted tokens and branching factors, from what pays on a slow processor to what pays on a GPU.
_SHAPES = ((4, 2), (8, 2), (12, 4), (24, 4), (63, 14))
# The most drafted tokens of trees of serial tokens alone.
_MOST_SHALLOW = 12
# Ranks nodes more sharply than the default.
_SHARP_TEMPERATURE = 0.3
# Cutting the output head below it saves next to nothing.
_MIN_COUNTED = 2048
# Sizes that compete for each further number of rows.
NUM_SIZES = 5


@dataclass(frozen=True)
class Tree:
    """
    Decoding settings of a drafter that are tuned; their meanings are those in [`DraftingSettings`].

    Attributes:
        vocabulary: What may be drafted: all tokens, the drafter's own list, or a counted one.
    """

    num_assistant_tokens: int
    branching_factor: int
    tree_depth: int
    draft_temperature: float | tuple[float, ...] = DRAFT_TEMPERATURE
    vocabulary: Literal["all", "own", "counted"] = "all"

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a generation config, in numbers and lists, without the vocabulary."""
        fields = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        return {name: value for name, value in fields.items() if name != "vocabulary"}


def list_trees(config: GumihoConfig, own: Tree, verifies_chains: bool) -> list[Tree]:
    """
    Returns some fifteen trees, all with the vocabulary of the drafter's own tree, which is the first of them. For a
    target that verifies chains only, returns one chain of each depth.
    """
    deepest, shallow = config.max_draft_depth, config.num_serial_tokens
    if verifies_chains:
        depths = sorted(range(1, deepest + 1), key=lambda depth: depth != own.tree_depth)
        return [replace(own, num_assistant_tokens=d, branching_factor=1, tree_depth=d) for d in depths]
    trees = [own, Tree(deepest, 1, deepest)]
    for size, branching in _SHAPES:
        trees += [Tree(size, branching, min(deepest, size), t) for t in (DRAFT_TEMPERATURE, _SHARP_TEMPERATURE)]
        if size <= _MOST_SHALLOW:
            # Without the parallel heads a cycle has a pass less.
            trees.append(Tree(size, branching, min(shallow, size)))
    return list(dict.fromkeys(replace(tree, vocabulary=own.vocabulary) for tree in trees))


def list_sizes(winner: Tree) -> list[Tree]:
    """Returns the winner with fewer and fewer drafted tokens: in a larger batch each of them costs more."""
    largest = winner.num_assistant_tokens
    sizes = {round(largest ** (step / (NUM_SIZES - 1))) for step in range(NUM_SIZES)}
    return [replace(winner, num_assistant_tokens=size) for size in sorted(sizes)]


def list_vocabularies(winner: Tree, vocab_size: int) -> list[Tree]:
    """Returns a tree with each vocabulary that may compete, beginning with its own."""
    trees = [winner, replace(winner, vocabulary="all"), replace(winner, vocabulary="counted")]
    return list(dict.fromkeys(trees[: 3 if num_counted(vocab_size) < vocab_size else 2]))


def num_counted(vocab_size: int) -> int:
    """Returns the number of tokens in a counted vocabulary: a quarter of all."""
    return max(vocab_size // 4, _MIN_COUNTED)
