"""Tiny pairs that vLLM can load on a CPU, what transformers drafts with them, and how the target distributes texts."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.drafting.drafter import GumihoDrafter


# vLLM's attention on a CPU knows no smaller heads.
FIELDS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
# With smaller weights no token is certain.
UNSURE_FIELDS = FIELDS | {"initializer_range": 0.08}


def write_target(folder: Path, config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    target.save_pretrained(folder)
    return target


def make_gumiho(target: PreTrainedModel, **overrides: Any) -> GumihoModel:
    """Returns a random drafter whose features depend on the whole text."""
    torch.manual_seed(1)
    gumiho = GumihoModel.from_target(target, **overrides).eval()
    for parameter in gumiho.parameters():
        if parameter.ndim == 2 and parameter is not gumiho.embed_tokens.weight:
            torch.nn.init.normal_(parameter, std=0.3)
    return gumiho


def make_transitions_felt(gumiho: GumihoModel, std: float = 100.0) -> None:
    """Gives a random drafter transitions about as large as what its heads still make then; `std` is that of `up`."""
    for parameter in gumiho.mlp.parameters():
        parameter.data *= 0.1
    for transition in gumiho.transition or ():
        torch.nn.init.normal_(transition.up, std=std)


def transformers_chains(
    target: PreTrainedModel,
    gumiho: GumihoModel,
    prompts: list[list[int]],
    num_tokens: int,
    max_new_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> list[list[list[int]]]:
    """Returns, for each prompt, the chains that transformers drafts for it, cycle by cycle."""
    gumiho.generation_config.update(branching_factor=1, num_assistant_tokens=num_tokens, break_even=0.01)
    texts: list[list[list[int]]] = []
    draft_tree = GumihoDrafter.draft

    def recording(self: GumihoDrafter, committed: Any) -> Any:
        tree = draft_tree(self, committed)
        texts[-1].append(tree.tokens[0, 1:].tolist())
        return tree

    with monkeypatch.context() as patch:
        patch.setattr(GumihoDrafter, "draft", recording)
        for prompt in prompts:
            texts.append([])
            settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            target.generate(torch.tensor([prompt]), **settings, assistant_model=gumiho)
    return texts


def exact_distribution(target: PreTrainedModel, prompt: list[int], temperature: float, top_p: float) -> torch.Tensor:
    """Returns the probabilities `(V, V, V, V)` of the next four tokens."""

    def next_probabilities(tokens: list[int]) -> torch.Tensor:
        logits = target(torch.tensor([tokens])).logits[0, -1].double() / temperature
        probabilities, order = logits.softmax(dim=-1).sort(descending=True)
        # The token that the sum passes `top_p` with is still in.
        probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0.0
        return torch.zeros_like(logits).scatter(0, order, probabilities / probabilities.sum())

    vocab_size = target.config.vocab_size
    joint = torch.ones(vocab_size, vocab_size, vocab_size, vocab_size, dtype=torch.float64)
    with torch.no_grad():
        for length in range(joint.ndim):
            for tokens in itertools.product(range(vocab_size), repeat=length):
                shape = (vocab_size, *[1] * (joint.ndim - length - 1))
                joint[tokens] *= next_probabilities([*prompt, *tokens]).view(shape)
    return joint


def p_value(texts: list[list[int]], expected: torch.Tensor) -> float:
    """
    Returns that of a chi-square test of texts of four tokens; cells that are expected to be nearly empty are one.

    Raises:
        AssertionError: A text is one that cannot be.
    """
    counts = torch.zeros_like(expected)
    for text in texts:
        counts[tuple(text)] += 1
    assert counts[expected == 0].sum() == 0
    wanted = expected.flatten() * len(texts)
    common = wanted >= 5
    found = [*counts.flatten()[common].tolist(), counts.flatten()[~common].sum().item()]
    theirs = [*wanted[common].tolist(), wanted[~common].sum().item()]
    keep = [index for index, value in enumerate(theirs) if value > 0]
    return float(chisquare([found[index] for index in keep], [theirs[index] for index in keep]).pvalue)
