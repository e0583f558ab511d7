"""What the target answers to the prompts: the text that drafts are made for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..model.modeling_gumiho import GumihoModel


@dataclass(frozen=True)
class Answer:
    """
    A prompt and what the target answered.

    Attributes:
        tokens (`(T,)`): Both, one after the other, on the CPU.
        prompt_length: Tokens of the prompt.
    """

    tokens: torch.Tensor
    prompt_length: int

    @property
    def new_tokens(self) -> torch.Tensor:
        """The answer `(n,)`, with the token that ends it if it has one."""
        return self.tokens[self.prompt_length :]


@torch.inference_mode()
def decode_answers(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    **generate_kwargs: Any,
) -> list[Answer]:
    """
    Lets the target answer prompts `(T,)`. The drafter only makes it faster: the texts are the target's.

    Args:
        target: The target.
        drafter: The drafter.
        prompts: Token ids of each prompt.
        max_new_tokens: Tokens to generate for each.
        **generate_kwargs: For `generate()`.
    """
    answers = []
    for index, prompt in enumerate(tqdm(prompts, desc="answering", unit="prompt")):
        torch.manual_seed(index)
        ids = prompt[None].to(target.device)
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, max_new_tokens=max_new_tokens,
            **{"do_sample": False} | generate_kwargs,
        )  # fmt: skip
        answers.append(Answer(output[0].cpu(), len(prompt)))
    return answers
