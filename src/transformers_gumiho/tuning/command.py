"""`gumiho tune`: finds the settings that decode fastest on this machine, and keeps them with the drafter."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..drafting.settings import DraftingSettings
from ..measuring.loading import load_pair
from ..measuring.prompts import encode_turn, read_questions
from ..model.modeling_gumiho import GumihoModel
from ..target.fingerprint import model_fingerprint
from ..target.machine import machine_name
from ..target.requirements import verification_kind
from .arguments import TuningArguments
from .finding import find_settings
from .journal import Journal
from .result import TuningResult
from .trees import Tree, list_trees
from .turns import TurnDecoder
from .vocabularies import Vocabularies


JOURNAL = "tuning.jsonl"


def tune(args: TuningArguments) -> TuningResult:
    """
    Finds the settings that decode fastest on this machine, and saves them in `generation_config.json`: some sixteen
    trees decode prompts in turns with plain decoding, and after each round the slower half leaves. Stopped, it
    continues where it was when it is called again with the same arguments.

    Raises:
        SystemExit: There is no folder to write into, or nothing to begin prompts with; or it was stopped.
        ValueError: An option is out of range, or the folder holds what a run with other arguments began.
    """
    folder = Path(args.output_dir or args.assistant)
    if not folder.is_dir() and args.output_dir is None:
        raise SystemExit("The drafter is not a folder; give --output_dir for its new generation_config.json.")
    questions = None if args.prompts is None else read_questions(args.prompts, num_questions=args.num_prompts)
    target, tokenizer, drafter = load_pair(args.target, args.assistant, args.dtype, args.device_map)
    if questions is None:
        prompts = _sample_prompts(target, args.num_prompts)
    else:
        prompts = [encode_turn(tokenizer, question.turns[:1], []) for question in questions]
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / JOURNAL, _settings_of_journal(target, drafter, prompts, args))
    decode = TurnDecoder(target, drafter, tokenizer.pad_token_id, args.max_new_tokens)
    trees = list_trees(drafter.config, _own_tree(drafter, args), verification_kind(target) == "chain")
    has_own = drafter.generation_config.draft_vocabulary is not None
    vocabularies = Vocabularies(drafter.config.get_text_config().vocab_size, has_own)
    try:
        result = find_settings(decode, trees, prompts, vocabularies, journal, args)
    except KeyboardInterrupt:
        raise SystemExit("Stopped. Run the same command again to continue from here.") from None
    drafter.generation_config.update(**result.settings)
    drafter.generation_config.save_pretrained(folder)
    journal.delete()
    return result


def _own_tree(drafter: GumihoModel, args: TuningArguments) -> Tree:
    """Returns the tree that the drafter would decode with."""
    settings = DraftingSettings.from_generation_config(drafter.generation_config, drafter.config, None)
    return Tree(
        settings.num_assistant_tokens, settings.branching_factor, settings.tree_depth, settings.draft_temperature
    )


def _settings_of_journal(
    target: PreTrainedModel, drafter: GumihoModel, prompts: list[list[int]], args: TuningArguments
) -> dict[str, Any]:
    """Returns what measurements depend on."""
    settings = {
        "machine": machine_name(target.device),
        "versions": [torch.__version__, transformers.__version__],
        "dtype": str(target.dtype),
        "target": model_fingerprint(target),
        "assistant": model_fingerprint(drafter),
        "settings of the assistant": drafter.generation_config.to_diff_dict(),
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "arguments": {k: v for k, v in asdict(args).items() if k not in ("target", "assistant", "output_dir")},
    }
    # As it is read again, with lists for tuples.
    return json.loads(json.dumps(settings))


def _sample_prompts(target: PreTrainedModel, num_prompts: int) -> list[list[int]]:
    """Returns beginnings of texts that the target writes itself."""
    start = target.generation_config.bos_token_id
    if start is None:
        raise SystemExit("The target has no token to begin a text with; give --prompts.")
    torch.manual_seed(0)
    beginnings = torch.full((num_prompts, 1), start, device=target.device)
    texts = target.generate(
        beginnings, attention_mask=torch.ones_like(beginnings), do_sample=True, max_new_tokens=32, min_new_tokens=32
    )
    return texts.tolist()
