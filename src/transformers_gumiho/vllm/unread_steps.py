"""Steps without drafts, which the serial head reads later, several in one pass."""

import copy
import dataclasses
from typing import Any

import torch


# With more steps, the next draft would wait as long as they save.
MAX_STEPS = 8


class UnreadSteps:
    """
    Steps of one batch in which each request had one token. A step is a copy of the arguments of
    `EagleProposer.propose`, because vLLM overwrites them in the next step.

    vLLM may give the blocks of an ended request to another one. So these steps have to be read before any other step.

    Args:
        max_tokens: Maximum number of tokens in a pass.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._requests: list[str] = []
        self._steps: list[dict[str, torch.Tensor]] = []
        self._metadata: Any = None

    def __len__(self) -> int:
        return len(self._steps)

    def has_room_for(self, requests: list[str]) -> bool:
        """Whether a step of these requests can be read together with the waiting steps."""
        num_steps = len(self._steps) + 1
        fits = num_steps <= MAX_STEPS and num_steps * len(requests) <= self._max_tokens
        return fits and requests == self._requests

    def add(self, requests: list[str], step: dict[str, Any]) -> None:
        """Adds a step of these `n` requests."""
        metadata = step["common_attn_metadata"]
        names = ("target_token_ids", "target_positions", "target_hidden_states", "next_token_ids")
        tensors = {name: step[name].clone() for name in names}
        self._requests = list(requests)
        self._steps.append(tensors | {"slot_mapping": metadata.slot_mapping.clone()})
        # vLLM computes the fields with an underscore from the others.
        self._metadata = dataclasses.replace(metadata, **{
            field.name: None if field.name.startswith("_") else copy.deepcopy(getattr(metadata, field.name))
            for field in dataclasses.fields(metadata)
        })  # fmt: skip

    def take(self) -> dict[str, Any]:
        """Removes the `m` steps; returns the arguments for one pass over their `n * m` tokens, request by request."""
        steps, self._steps = self._steps, []
        merged = {
            # Positions may be `(3, n)`. States are `(n, H)`.
            name: torch.stack(tensors, dim).flatten(dim - 1, dim)
            for name, dim in (
                ("target_token_ids", 1), ("target_hidden_states", 1), ("slot_mapping", 1),
                ("target_positions", steps[0]["target_positions"].dim()),
            )
            for tensors in [[step[name] for step in steps]]
        }  # fmt: skip
        slots = merged.pop("slot_mapping")
        starts = torch.arange(0, len(slots) + 1, len(steps), dtype=torch.int32)
        metadata = dataclasses.replace(
            self._metadata,
            query_start_loc=starts.to(slots.device),
            query_start_loc_cpu=starts,
            num_actual_tokens=len(slots),
            max_query_len=len(steps),
            slot_mapping=slots,
        )
        # For each request, the pass reads all tokens but the first, and then the next token.
        last = {"next_token_ids": steps[-1]["next_token_ids"], "common_attn_metadata": metadata}
        return merged | last | {"token_indices_to_sample": None, "num_rejected_tokens_gpu": None}
