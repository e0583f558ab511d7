"""Writing users' prompts with a target in this process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..row_leaving import continue_rows
from ..sampling import Sampling
from .user_turn import find_user_turn


@dataclass(frozen=True)
class Text:
    """What was written, whether the target `ended` it rather than a limit, and the `problem` of a useless one."""

    text: str
    ended: bool
    problem: str | None = None


def write_user_turns(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    sampling: Sampling,
    openings: Sequence[str],
    seed: int,
) -> list[Text]:
    """
    Returns what a user might say first, for each of these first words, with these.

    Args:
        target: The target.
        tokenizer: The target's, with a chat template.
        max_tokens: Tokens of a prompt after its first words, at most.
        sampling: How prompts are sampled.
        openings: First words; empty ones leave these to the target.
        seed: For sampling.
    """
    torch.manual_seed(seed)
    turn, end = find_user_turn(tokenizer), target.generation_config.eos_token_id
    ends = turn.ends(tokenizer) | {*(end if isinstance(end, list) else [end])} - {None}
    prompts = [tokenizer(turn.opening + words, add_special_tokens=False)["input_ids"] for words in openings]
    written = continue_rows(target, prompts, max_tokens, ends, sampling)
    texts = []
    for opening, prompt, tokens in zip(openings, prompts, written, strict=True):
        ended = tokens[-1] in ends
        # Where it follows first words, it is decoded with them: alone it may lack a space in front.
        before = prompt if opening else []
        said = tokenizer.decode(before + tokens[: -1 if ended else None])[len(tokenizer.decode(before)) :]
        text = opening + said
        cut = turn.cut(text)
        texts.append(Text(cut, ended or cut != text.strip()))
    return texts
