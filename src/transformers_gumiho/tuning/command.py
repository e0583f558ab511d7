"""`gumiho tune`: finds the settings that decode fastest on this machine, and keeps them with the drafter."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..measuring.decoding_settings import decoding_settings
from ..measuring.loading import load_pair
from ..measuring.prompts import encode_turn, read_questions
from .arguments import TuningArguments
from .finding import find_best_tree
from .result import TuningResult
from .sizes import fit_sizes


def tune(args: TuningArguments) -> TuningResult:
    """
    Fits the temperature of the drafts at each depth, measures what cycles cost here and how far trees are accepted,
    lets the trees that should be fastest decode the prompts in turns, does the same with numbers of tokens that may be
    drafted and with sizes that fit each cycle, and writes the settings of the winners and what cycles cost into
    `generation_config.json`.

    Raises:
        SystemExit: There is no folder to write into, or nothing to begin prompts with.
    """
    folder = Path(args.output_dir or args.assistant)
    if not folder.is_dir() and args.output_dir is None:
        raise SystemExit("The drafter is not a folder; give --output_dir for its new generation_config.json.")
    questions = None if args.prompts is None else read_questions(args.prompts, num_questions=args.num_prompts)
    target, tokenizer, drafter = load_pair(args.target, args.assistant, args.dtype, args.device_map)
    if questions is None:
        prompts = _sample_prompts(target, args.num_prompts)
    else:
        prompts = [torch.tensor(encode_turn(tokenizer, question.turns[:1], [])) for question in questions]
    # What is compared are trees of fixed sizes, whatever an earlier run has left.
    with decoding_settings(drafter, {"cycle_costs": None}):
        result = find_best_tree(target, drafter, prompts, args)
        if args.tune_sizes:
            result = replace(result, sizes=fit_sizes(target, drafter, prompts, result.settings, args))
    drafter.generation_config.update(**result.settings)
    drafter.generation_config.save_pretrained(folder)
    return result


def _sample_prompts(target: PreTrainedModel, num_prompts: int) -> list[torch.Tensor]:
    """Returns beginnings of texts that the target writes itself."""
    start = target.generation_config.bos_token_id
    if start is None:
        raise SystemExit("The target has no token to begin a text with; give --prompts.")
    torch.manual_seed(0)
    beginnings = torch.full((num_prompts, 1), start, device=target.device)
    texts = target.generate(
        beginnings, attention_mask=torch.ones_like(beginnings), do_sample=True, max_new_tokens=32, min_new_tokens=32
    )
    return list(texts.cpu())
