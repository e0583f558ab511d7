"""Tiny pairs that vLLM can load on a CPU, and what transformers drafts with them."""

from pathlib import Path
from typing import Any

import torch
from draft_trees import recorded_drafts
from transformers import AutoModelForCausalLM, PreTrainedModel

from transformers_gumiho import GumihoModel


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
    target: PreTrainedModel, gumiho: GumihoModel, prompts: list[list[int]], num_tokens: int, max_new_tokens: int
) -> list[list[list[int]]]:
    """Returns, for each prompt, the chains that transformers drafts for it, cycle by cycle."""
    gumiho.generation_config.update(branching_factor=1, num_assistant_tokens=num_tokens, break_even=0.01)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = []
    for prompt in prompts:
        with recorded_drafts() as drafts:
            target.generate(torch.tensor([prompt]), **settings, assistant_model=gumiho)
        texts.append([tree.tokens[0, 1:].tolist() for _, tree in drafts])
    return texts
