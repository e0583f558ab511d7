"""Full Tree Attention's recombinations: every parallel token under every serial path and earlier parallel token.

Given a serial path, the heads draft independently of one another, so each head's tokens can follow every token of the
head before it. Only some of these paths can be among the best of a small tree, and which ones does not depend on the
scores: a path is never better than one that takes a more likely token somewhere. They are therefore enumerated once,
and scored without a search.
"""

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from .draft_tree import DraftLevel


# Of all rows together. Their number grows faster than the tree. From about here on searching depth by depth takes less
# time, as measured on a CPU.
MAX_RECOMBINATIONS = 4096


class Recombinations:
    """
    The paths below the serial ones that can be among the best nodes of a tree; see [`find`].

    Args:
        levels: For each head, the index of each path's parent among those of the head before (among the serial paths
            for the first head), and of its last token in `(heads, P, M)` flattened.
        num_above: Nodes of the last serial level.
    """

    def __init__(self, levels: Sequence[tuple[np.ndarray, np.ndarray]], num_above: int):
        parents, picks = zip(*levels, strict=True)
        self._sizes = [len(level) for level in picks]
        self._parents = [torch.from_numpy(level) for level in parents]
        self._picks = torch.from_numpy(np.concatenate(picks))
        # As a level counts them: on from the nodes of the level above.
        starts = itertools.accumulate([num_above, *self._sizes])
        counted_on = [parents[0], *(level + start for level, start in zip(parents[1:], starts, strict=False))]
        self._level_parents = torch.from_numpy(np.concatenate(counted_on))

    @classmethod
    def find(
        cls,
        num_nodes: int,
        serial_depth: int,
        num_above: int,
        num_paths: int,
        num_heads: int,
        num_candidates: int,
        batch_size: int = 1,
    ) -> "Recombinations | None":
        """
        Enumerates the recombinations. Returns `None` where there are none, or more than [`MAX_RECOMBINATIONS`].

        Args:
            num_nodes: Drafted nodes of the tree.
            serial_depth: Length of the serial paths.
            num_above: Nodes of the last serial level.
            num_paths: Serial paths that are extended, `P`.
            num_heads: Parallel tokens of the longest paths.
            num_candidates: Candidate tokens of a head, `M`.
            batch_size: Rows, `B`.
        """
        limit = MAX_RECOMBINATIONS // batch_size
        levels = _enumerate(num_nodes, serial_depth, num_paths, num_heads, num_candidates, limit)
        return cls(levels, num_above) if levels else None

    def grow(self, last_level: DraftLevel, tokens: torch.Tensor, log_probs: torch.Tensor) -> DraftLevel:
        """
        Returns the nodes of all depths below the last serial level.

        Args:
            last_level: The last serial level, of which the first `P` nodes are extended.
            tokens (`(B, heads, P, M)`): Candidate tokens, best first.
            log_probs (`(B, heads, P, M)`): Their draft log-probabilities.
        """
        if self._picks.device != tokens.device:
            self._move(tokens.device)
        new_tokens = tokens.flatten(1).index_select(1, self._picks)
        new_log_probs = log_probs.flatten(1).index_select(1, self._picks)
        # One depth after the other: a sum in any other order could be rounded to more than that of the parent.
        scores = [last_level.scores]
        for parents, level_log_probs in zip(self._parents, new_log_probs.split(self._sizes, dim=1), strict=True):
            scores.append(scores[-1].index_select(1, parents) + level_log_probs)
        return DraftLevel(new_tokens, torch.cat(scores[1:], dim=1), self._level_parents.expand_as(new_tokens))

    def _move(self, device: torch.device) -> None:
        self._parents = [parents.to(device) for parents in self._parents]
        self._picks, self._level_parents = self._picks.to(device), self._level_parents.to(device)


@functools.lru_cache(maxsize=512)
def _enumerate(
    num_nodes: int, serial_depth: int, num_paths: int, num_heads: int, num_candidates: int, limit: int
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """
    Returns the levels that [`Recombinations`] takes, `None` if there are more than `limit` paths.

    A path that takes the tokens of ranks `r_1, ..., r_k` (from 1) below the p-th best serial path is no better than
    any path below the same one that has smaller ranks and no more tokens, of which there are `r_1 ... r_j` of each
    length j; nor than the p best serial paths, nor than the ancestors of these, at least one at each depth. With more
    than `num_nodes` of them, itself included, the tree is full without it.
    """
    paths = np.arange(num_paths)
    no_worse = serial_depth + paths
    no_worse_of_length = np.ones_like(paths)
    levels: list[tuple[np.ndarray, np.ndarray]] = []
    total = 0
    for head in range(num_heads):
        num_children = np.clip((num_nodes - no_worse) // no_worse_of_length, 0, num_candidates)
        total += num_children.sum()
        if total > limit:
            return None
        parents = np.repeat(np.arange(len(paths)), num_children)
        ranks = np.arange(len(parents)) - (np.cumsum(num_children) - num_children)[parents]
        paths = paths[parents]
        no_worse_of_length = no_worse_of_length[parents] * (ranks + 1)
        no_worse = no_worse[parents] + no_worse_of_length
        levels.append((parents, (head * num_paths + paths) * num_candidates + ranks))
    return levels
