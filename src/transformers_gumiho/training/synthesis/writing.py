"""Writing users' prompts with a target in this process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..row_leaving import continue_rows
from ..sampling import Sampling
from .user_turn import find_user_turn


@dataclass(frozen=True)
class Start:
    """
    What stands before the words that a target writes for a user.

    Attributes:
        system: What the system says. By default, whatever the template says.
        opening: The user's first words. By default, the target finds these, too.
    """

    system: str | None = None
    opening: str = ""


@dataclass(frozen=True)
class Text:
    """
    What was written.

    Attributes:
        text: Without its end; where a server wrote it, without special tokens.
        ended: Whether the target ended it, rather than a limit.
        problem: Why it is of no use, if it is not.
    """

    text: str
    ended: bool
    problem: str | None = None


def write_user_turns(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    sampling: Sampling,
    starts: Sequence[Start],
    seed: int,
) -> list[Text]:
    """
    Returns what a user might say first after each start, the opening included.

    Args:
        target: The target.
        tokenizer: The target's, with a chat template.
        max_tokens: Tokens of a prompt, at most.
        sampling: How prompts are sampled.
        starts: What stands before them.
        seed: For sampling.
    """
    torch.manual_seed(seed)
    turns = [find_user_turn(tokenizer, start.system) for start in starts]
    end = target.generation_config.eos_token_id
    ends = {*(end if isinstance(end, list) else [end])} - {None}
    ends = ends.union(*(turn.ends(tokenizer) for turn in turns))
    prompts = [turn.opening_ids(tokenizer, start.opening) for turn, start in zip(turns, starts, strict=True)]
    pad = min(ends, default=0)
    kwargs = sampling.generate_kwargs | {"eos_token_id": sorted(ends) or None, "pad_token_id": pad}
    texts = []
    for turn, start, prompt, tokens in zip(
        turns, starts, prompts, continue_rows(target, prompts, max_tokens, ends, pad, kwargs), strict=True
    ):
        ended = tokens[-1] in ends
        # Where it follows an opening, it is decoded with it: alone it may lack a space in front.
        before = prompt if start.opening else []
        said = tokenizer.decode(before + tokens[: -1 if ended else None])[len(tokenizer.decode(before)) :]
        text = start.opening + said
        cut = turn.cut(text)
        texts.append(Text(cut, ended or cut != text.strip()))
    return texts
