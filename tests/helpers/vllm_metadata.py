"""What the plug-in reads of the metadata of vLLM's attention."""

import dataclasses

import torch


@dataclasses.dataclass
class Metadata:
    """The fields of vLLM's that are read or changed, one that is kept, and one that is computed of others."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    _num_computed: torch.Tensor | None = None
