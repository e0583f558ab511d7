"""Sampling at all nodes of a draft tree at once: the host waits for the path, not for each of its tokens."""

import torch
from transformers.generation import EtaLogitsWarper, LogitsProcessorList

from ..tree.draft_tree import DraftTree
from .sampling_noise import decide_race
from .sequences import CommittedSequences


# On a CPU nothing waits, and only the nodes that are visited cost time: 4 ms each with top-p, 62 ms for 63 nodes.
_DEVICE_TYPES = ("cuda", "xpu")
_MAX_BYTES = 256 << 20  # of the float32 scores of all nodes; processors make several tensors of their size


def can_sample_at_once(sequences: CommittedSequences, logits_processor: LogitsProcessorList) -> bool:
    """
    Whether tokens may be drawn before those above them are committed, if no processor looks at the prefix. Streamers
    and criteria run between two draws. `EtaLogitsWarper` refuses NaN, also at nodes that the walk does not visit.
    """
    follows_tokens = sequences.streamer is not None or len(sequences.custom_criteria) > 0
    has_eta = any(type(processor) is EtaLogitsWarper for processor in logits_processor)
    return sequences.device.type in _DEVICE_TYPES and not follows_tokens and not has_eta


def fits_memory(logits: torch.Tensor) -> bool:
    """Whether the scores of all nodes may be held at once."""
    return 4 * logits.numel() <= _MAX_BYTES


def draw_at_nodes(tree: DraftTree, scores: torch.Tensor, races: torch.Tensor) -> torch.Tensor:
    """
    Returns the token `(B, N + 1)` that is drawn after each node, `NO_TOKEN` where its scores are no distribution.

    Args:
        tree: The draft tree.
        scores (`(B, N + 1, V)`): Processed logits, float32.
        races (`(B, L, V)`): The exponential variates of the draws after the nodes of each depth.
    """
    batch_size, num_depths, _ = races.shape
    first_draws = torch.arange(0, batch_size * num_depths, num_depths, device=tree.depths.device)
    index = (tree.depths + first_draws[:, None]).flatten().to(scores.device)
    race = races.to(scores.device).flatten(0, 1).index_select(0, index).view_as(scores)
    return decide_race(scores.softmax(dim=-1), race).squeeze(-1).to(tree.tokens.device)
