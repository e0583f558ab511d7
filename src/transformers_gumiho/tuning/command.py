"""`gumiho tune`: finds the settings that decode fastest on this machine, and saves them with the drafter."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..measuring.modes import Runner
from ..measuring.prompts import read_prompts
from ..model.decoding_settings import DraftingSettings
from ..model.modeling_gumiho import GumihoModel
from ..open_text import encode_turn
from ..pairs import load_pair
from ..user_errors import UserValueError, as_user_errors
from ..verification.placement import input_device
from ..verification.traits import TargetTraits
from .finding import TuningArguments, find_settings
from .result import TuningResult
from .trees import Tree, list_trees


def tune(args: TuningArguments) -> TuningResult:
    """
    Finds the settings that decode fastest on this machine, and saves them in `generation_config.json`. Some fifteen
    trees decode prompts in turns with plain decoding, and the slower half leaves after each round.

    Raises:
        KeyboardInterrupt: The run was stopped.
        ValueError: An option is out of range, there is no folder to write into, or the target has no token to begin
            prompts with.
    """
    is_named = args.assistant is not None or args.pair is None
    if args.output_dir is None and is_named and not Path(args.assistant or "").is_dir():
        raise UserValueError("The drafter is not a folder; give --output_dir for its new generation_config.json.")
    questions = None if args.prompts is None else read_prompts(args.prompts, num_prompts=args.num_prompts)
    args = args.resolved()
    folder = Path(args.output_dir or str(args.assistant))
    target, tokenizer, drafter = load_pair(args)
    if questions is None:
        prompts = _sample_prompts(target, args.num_prompts)
    else:
        prompts = [encode_turn(tokenizer, question.turns[:1], []) for question in questions]
    with as_user_errors():
        folder.mkdir(parents=True, exist_ok=True)
    own = _own_tree(target, drafter, min(args.batch_sizes, default=1))
    trees = list_trees(drafter.config, own, TargetTraits.of(target).is_chain)
    runner = Runner(target, tokenizer.pad_token_id, args.max_new_tokens)
    try:
        result = find_settings(runner, drafter, trees, prompts, args)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Stopped. The drafter's settings are as they were.") from None
    drafter.generation_config.update(**result.settings)
    drafter.generation_config.save_pretrained(folder)
    return result


def _own_tree(target: PreTrainedModel, drafter: GumihoModel, num_rows: int) -> Tree:
    """Returns the tree with which the drafter decodes by its own settings."""
    settings = DraftingSettings.from_generation_config(
        drafter.generation_config, drafter.config, None, num_rows, input_device(target).type
    )
    shape = settings.num_assistant_tokens, settings.branching_factor, settings.tree_depth
    return Tree(*shape, settings.draft_temperature, "all" if settings.draft_vocabulary is None else "own")


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
