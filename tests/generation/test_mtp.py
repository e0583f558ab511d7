"""The MTP layers of targets draft what an independent implementation computes, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_trees import Trees
from mtp import FAMILIES, MtpTarget, make_mtp_target
from targets import equals_plain, make_prompts

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.observers import observing


TREES = {"num_assistant_tokens": 10, "branching_factor": 3, "tree_depth": 4, "draft_temperature": 1.0}
VOCAB_SIZE = 24


def load(target: MtpTarget, **settings: Any) -> GumihoModel:
    """Returns the drafter of a target's MTP layer. It never pauses."""
    drafter = GumihoModel.from_pretrained(target.folder, dtype=torch.float32)
    settings = TREES | ({"branching_factor": 1} if target.family.is_chain else {}) | settings
    drafter.generation_config.update(break_even=0.01, full_tree_attention=False, **settings)
    return drafter


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    return make_prompts(lengths, 3, VOCAB_SIZE)


def expected_scores(target: MtpTarget, text: list[int], paths: list[tuple[int, ...]]) -> list[float]:
    """Returns the sum of the oracle's log-probabilities of the tokens of each path."""
    known: dict[tuple[int, ...], torch.Tensor] = {}
    scores = []
    for path in paths:
        score = 0.0
        for depth, token in enumerate(path):
            above = path[:depth]
            if above not in known:
                known[above] = target.logits(text, above).log_softmax(-1)
            score += float(known[above][token])
        scores.append(score)
    return scores


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_every_tree_of_a_text_is_the_oracles(model_type: str, tmp_path: Path) -> None:
    target = make_mtp_target(model_type, tmp_path)
    with observing(seen := Trees()):
        output = equals_plain(target.model, load(target), **prompts(9), max_new_tokens=10)
    text, end = output.sequences[0].tolist(), 9
    for tree, num_accepted in zip(seen.trees, output.accepted_lengths[0], strict=True):
        nodes = [(tree.ancestors[0, node].nonzero()[1:, 0], node) for node in range(1, tree.tokens.shape[1])]
        paths = [tuple(tree.tokens[0, above].tolist()) for above, _ in nodes]
        # The root is the newest committed token, which the layer reads beside the state before it.
        wanted = expected_scores(target, text[: end + 1], paths)
        torch.testing.assert_close([float(tree.scores[0, node]) for _, node in nodes], wanted, atol=1e-3, rtol=0)
        # The best tokens are among the nodes.
        best = target.logits(text[: end + 1], ()).argmax()
        assert (int(best),) in paths or len(text) - end == 2
        end += num_accepted
    assert len(seen.trees) > 2
