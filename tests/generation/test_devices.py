"""
A cycle of a drafter and a target on two devices, on tensors without data ("meta" stands for the other device):
operations on tensors of two devices raise, and so does whatever makes the host wait.
"""

import pytest
import torch
from targets import make_drafter, make_target
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from transformers_gumiho import DraftingSettings, GumihoCandidateGenerator
from transformers_gumiho.decoding.token_choice import _walk_greedily
from transformers_gumiho.drafting.committed_tokens import CommittedTokens
from transformers_gumiho.target.tree_cache import TreeCache


def drop_data(model: nn.Module, device: str) -> None:
    """Puts tensors on `device`, under a `FakeTensorMode` without data, in the place of the model's."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(("num_assistant_tokens", "full_tree_attention"), [(12, True), (200, True), (12, False)])
@pytest.mark.parametrize(
    ("target_device", "drafter_device"), [("cpu", "cpu"), ("cpu", "meta"), ("meta", "cpu"), ("meta", "meta")]
)
@pytest.mark.parametrize("draft_vocabulary", [None, [6, 1, 5, 2]], ids=["all", "some"])
@torch.no_grad()
def test_trees_are_drafted_across_devices(
    target_device: str,
    drafter_device: str,
    num_assistant_tokens: int,
    full_tree_attention: bool,
    batch_size: int,
    draft_vocabulary: list[int] | None,
) -> None:
    target = make_target()
    drafter = make_drafter(
        target,
        num_assistant_tokens=num_assistant_tokens,
        full_tree_attention=full_tree_attention,
        branching_factor=3,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        drop_data(target, target_device)
        drop_data(drafter, drafter_device)
        device, hidden_size = torch.device(target_device), target.config.hidden_size
        head = target.lm_head.weight
        token_ids = None
        if draft_vocabulary is not None:
            token_ids = torch.tensor(draft_vocabulary, device=device)
            head = head[token_ids]
        noise = torch.zeros(batch_size, 7, target.config.vocab_size, device=device)
        generator = GumihoCandidateGenerator(
            drafter,
            lm_head=lambda features: features.to(device) @ head.T,
            settings=DraftingSettings.from_generation_config(drafter.generation_config, drafter.config, 1.0),
            cache=TreeCache(batch_size, 64),
            token_ids=token_ids,
            peek_noise=lambda _, ids: (
                noise if noise is None or ids is None else noise.index_select(2, ids.to(noise.device))
            ),
        )
        # After the prompt, after a cycle in which all rows advance alike, and after one in which they do not.
        for lengths in ([5] * batch_size, [3] * batch_size, list(range(1, batch_size + 1))):
            committed = CommittedTokens(
                torch.ones(batch_size, max(lengths), dtype=torch.long, device=device),
                torch.zeros(batch_size, max(lengths), hidden_size, dtype=torch.float64, device=device),
                torch.arange(max(lengths), device=device).expand(batch_size, -1),
                lengths,
            )
            tree = generator.draft_tree(committed)
            for name in ("tokens", "parents", "depths", "scores", "ancestors"):
                assert getattr(tree, name).device == device
            _, told = _walk_greedily(tree, torch.zeros(*tree.tokens.shape, target.config.vocab_size, device=device))
            assert told.shape == (batch_size, 9)
