"""Sampling at all nodes of a draft tree at once: the host waits for the path, not for each of its tokens."""

import torch
from transformers.generation import EtaLogitsWarper, LogitsProcessorList

from ..tree.draft_tree import DraftTree
from .sampling_noise import decide_race
from .sequences import CommittedSequences


# On a CPU there is no wait to save, and each node costs time: 4 ms for one with top-p, 62 ms for 63.
_DEVICE_TYPES = ("cuda", "xpu")
_MAX_BYTES = 256 << 20  # of the float32 scores of all nodes; processors make several tensors of their size


def can_sample_at_once(sequences: CommittedSequences, logits_processor: LogitsProcessorList) -> bool:
    """
    Whether tokens may be drawn before their parents are committed, if no processor reads the prefix. Not with a
    streamer or custom criteria, which run between two draws, and not with `EtaLogitsWarper`, which raises an error for
    NaN also at nodes that the walk does not visit.
    """
    follows_tokens = sequences.streamer is not None or len(sequences.custom_criteria) > 0
    has_eta = any(type(processor) is EtaLogitsWarper for processor in logits_processor)
    return sequences.device.type in _DEVICE_TYPES and not follows_tokens and not has_eta


def fits_memory(logits: torch.Tensor) -> bool:
    """Whether the scores of all nodes fit the memory limit."""
    return 4 * logits.numel() <= _MAX_BYTES


def draw_at_nodes(tree: DraftTree, scores: torch.Tensor, races: torch.Tensor) -> torch.Tensor:
    """
    Returns the token `(B, N + 1)` that is drawn after each node; `NO_TOKEN` if its scores are no distribution.

    Args:
        tree: The draft tree.
        scores (`(B, N + 1, V)`): Processed logits, float32.
        races (`(B, L, V)`): Exponential variates of the draws at each depth.
    """
    batch_size, num_depths, _ = races.shape
    first_draws = torch.arange(0, batch_size * num_depths, num_depths, device=tree.depths.device)
    index = (tree.depths + first_draws[:, None]).flatten().to(scores.device)
    race = races.to(scores.device).flatten(0, 1).index_select(0, index).view_as(scores)
    return decide_race(scores.softmax(dim=-1), race).squeeze(-1).to(tree.tokens.device)
