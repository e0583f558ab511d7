"""Steps that vLLM's drafter reads later, on stand-ins; tests/serving compares the drafts."""

from typing import Any

import pytest
import torch
from vllm_metadata import Metadata

from transformers_gumiho.vllm.unread_steps import MAX_STEPS, UnreadSteps


@pytest.mark.parametrize("num_positions", [None, 3])
def test_steps_are_merged_request_by_request(num_positions: int | None) -> None:
    """vLLM reuses its tensors: what counts is what they held when a step was added."""
    tokens, hidden, slots = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    positions = torch.zeros(*([num_positions] if num_positions else []), 2, dtype=torch.int64)
    starts, seq_lens = torch.arange(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    unread = UnreadSteps(100)
    for step in range(3):
        rows = torch.tensor([10 + step, 20 + step])
        for tensor in (tokens, positions, slots, seq_lens):
            tensor.copy_(rows)
        hidden.copy_(rows[:, None])
        metadata = Metadata(starts, starts, 2, 1, slots, seq_lens, seq_lens)
        unread.add(["a", "b"], {
            "target_token_ids": tokens, "target_positions": positions, "target_hidden_states": hidden,
            "next_token_ids": tokens + 1, "common_attn_metadata": metadata,
        })  # fmt: skip
    for tensor in (tokens, positions, slots, seq_lens, hidden):
        tensor.zero_()
    read, merged = unread.take(), torch.tensor([10, 11, 12, 20, 21, 22])
    metadata = read["common_attn_metadata"]
    for found in (read["target_token_ids"], metadata.slot_mapping, *read["target_positions"].view(-1, 6)):
        assert found.tolist() == merged.tolist()
    assert torch.equal(read["target_hidden_states"], merged[:, None].expand(6, 5).float())
    assert read["target_positions"].dim() == positions.dim()
    assert read["next_token_ids"].tolist() == [13, 23]
    assert (metadata.num_actual_tokens, metadata.max_query_len, vars(metadata)["_num_computed"]) == (6, 3, None)
    assert metadata.query_start_loc.tolist() == metadata.query_start_loc_cpu.tolist() == [0, 3, 6]
    assert metadata.seq_lens.tolist() == [12, 22]
    assert len(unread) == 0


def test_only_steps_of_the_same_requests_are_read_together() -> None:
    def room(max_tokens: int, num_steps: int, others: Any = ("a", "b")) -> bool:
        unread = UnreadSteps(max_tokens)
        starts = torch.arange(3)
        for _ in range(num_steps):
            metadata = Metadata(starts, starts, 2, 1, starts, starts)
            names = ("target_token_ids", "target_positions", "target_hidden_states", "next_token_ids")
            unread.add(["a", "b"], dict.fromkeys(names, starts) | {"common_attn_metadata": metadata})
        return unread.has_room_for(list(others))

    assert room(100, MAX_STEPS - 1)
    assert not room(100, MAX_STEPS)
    assert room(8, 3)
    assert not room(8, 4)
    for others in (["a"], ["b", "a"], ["a", "c"], ["a", "b", "c"]):
        assert not room(100, 1, others)
