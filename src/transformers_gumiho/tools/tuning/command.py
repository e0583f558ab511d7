"""`gumiho tune`: finds and saves the settings that decode fastest on this machine."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, logging

from ...commands import UserOSError, UserValueError, make_folder, option
from ...files import check_is_no_snapshot
from ...generation.verification.traits import TargetTraits, input_device
from ...model.modeling_gumiho import GumihoModel
from ...model.mtp_checkpoint import OWN_MTP_LAYERS, has_mtp_layers
from ...training.data.open_text import encode_turn
from ..measuring.prompts import read_prompts
from ..measuring.timing import Prompts, Runner
from ..pairs import PairArguments, load_pair, prompts_field, settings_of
from .contest import Contests, TuningResult
from .trees import Tree, list_sizes, list_trees


logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class TuningArguments(PairArguments):
    """The options of `gumiho tune`."""

    prompts: str | None = prompts_field(without=" Without it, the target samples its own prompts.")
    output_dir: str | None = option("Receives `generation_config.json` (default: the drafter's folder).")
    num_prompts: int = option("Number of prompts: two thirds choose, one third times the winner.", 18, at_least=1)
    max_new_tokens: int = option("Maximum number of tokens per prompt.", 64, at_least=1)
    batch_sizes: list[int] = option("Numbers of rows for which to choose a tree size.", [1, 4, 8], at_least=1)
    temperature: float = option("Sampling temperature to tune for; 0 is greedy.", 0.0, at_least=0)
    tune_vocabulary: bool = option("Also try all tokens, where the drafter has a draft vocabulary.", True)


def tune(args: TuningArguments) -> TuningResult:
    """
    Finds the settings that decode fastest on this machine, and saves them in `generation_config.json`.

    Raises:
        KeyboardInterrupt: The run was stopped.
        OSError: The folder cannot be written to, or holds links to files elsewhere.
        ValueError: There is no folder to write into.
    """
    questions = None if args.prompts is None else read_prompts(args.prompts, num_prompts=args.num_prompts)
    args = args.resolved()
    folder = Path(args.output_dir or str(args.assistant))
    is_target = args.assistant == OWN_MTP_LAYERS or has_mtp_layers(args.assistant, {})
    if args.output_dir is None and (is_target or not folder.is_dir()):
        raise UserValueError("The drafter has no folder of its own. Give --output_dir for its generation_config.json.")
    if has_mtp_layers(folder, {}):
        raise UserValueError(f"{str(folder)!r} is a target, whose files stay as they are. Give another --output_dir.")
    check_is_no_snapshot(folder)
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise UserOSError(f"{str(folder)!r} cannot be written to. Name another folder with --output_dir.")
    target, tokenizer, drafter = load_pair(args)
    prompts = [encode_turn(tokenizer, question.turns[:1], []) for question in questions or []]
    if questions is None:
        prompts = _sample_prompts(target, args.num_prompts)
    make_folder(folder)
    own = settings_of(target, drafter, min(args.batch_sizes))
    shape = own.num_assistant_tokens, own.branching_factor, own.tree_depth
    trees = list_trees(drafter.config, Tree(*shape, own.draft_temperature), TargetTraits.of(target).is_chain)
    runner = Runner(target, tokenizer.pad_token_id, args.max_new_tokens)
    try:
        result = find_settings(runner, drafter, trees, prompts, args)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Stopped. The drafter's settings are as they were.") from None
    drafter.generation_config.update(**result.settings)
    if is_target:  # settings alone would be no drafter
        drafter.save_pretrained(folder)
    drafter.generation_config.save_pretrained(folder)
    return result


def _sample_prompts(target: PreTrainedModel, num_prompts: int) -> list[list[int]]:
    """Returns beginnings of texts, sampled from the target."""
    start = target.generation_config.bos_token_id
    if start is None:
        raise UserValueError("The target has no token to begin a text with; give --prompts.")
    torch.manual_seed(0)
    beginnings = torch.full((num_prompts, 1), start, device=input_device(target))
    texts = target.generate(
        beginnings, attention_mask=torch.ones_like(beginnings), do_sample=True, max_new_tokens=32, min_new_tokens=32
    )
    return texts.tolist()


def find_settings(
    runner: Runner, drafter: GumihoModel, trees: Sequence[Tree], prompts: Prompts, args: TuningArguments
) -> TuningResult:
    """
    Compares trees, of which the first is the drafter's own, then vocabularies, then sizes for more rows, and times the
    winners on other prompts. Raises `ValueError` for fewer than two prompts.
    """
    if len(prompts) < 2:
        raise UserValueError(
            f"Tuning needs two prompts, one of them to time the winner, got {len(prompts)}. Raise `num_prompts`."
        )
    contests = Contests(runner, drafter)
    # Two thirds of the prompts are for the contests.
    num_seen = min(math.ceil(len(prompts) * 2 / 3), len(prompts) - 1)
    seen, unseen = prompts[:num_seen], prompts[num_seen:]
    first, *further = sorted(set(args.batch_sizes))
    by_tree = contests.hold("trees", trees, seen, first, args.temperature)
    winner = next(iter(by_tree))
    by_vocabulary = {}
    # A drafter's own output head scores a part of the vocabulary, and no other tokens.
    has_choice = (
        getattr(drafter.generation_config, "draft_vocabulary", None) and drafter.config.draft_vocab_size is None
    )
    if args.tune_vocabulary and has_choice:
        both = [winner, replace(winner, drafts_all_tokens=True)]
        by_vocabulary = contests.hold("vocabularies", both, seen, first, args.temperature)
        winner = next(iter(by_vocabulary))
    chosen = {first: winner}
    for rows in further:
        try:
            of_rows = contests.hold(f"{rows} rows", list_sizes(winner), seen, rows, args.temperature)
            chosen[rows] = next(iter(of_rows))
        except ValueError as error:  # some targets cannot verify drafts in padded batches
            logger.warning(f"Not tuned for {rows} rows: {error}")
    finals = {}
    for kind, temperature in (("greedy", 0.0), ("sampled", args.temperature or 1.0)):
        for rows, tree in chosen.items():
            final = contests.hold(f"{rows} rows, {kind}", [tree], unseen, rows, temperature, is_final=True)
            finals[kind, rows] = final[tree]
    return TuningResult(trees[0], by_tree, by_vocabulary, chosen, finals)
