"""Runs a target over a dataset once and keeps its features, so that a drafter can be trained without running it.

    python examples/extract_features.py --target_model NAME --dataset_name NAME_OR_FILE --output_dir features
    python examples/train_gumiho.py --features_dir features --output_dir gumiho

Started again after it was stopped, it goes on where it was. `accelerate launch` shares the work between devices.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from transformers_gumiho.text_files import read_text
from transformers_gumiho.training import cache_size, load_conversations, prepare_dataset, write_feature_cache
from transformers_gumiho.user_errors import told_in_one_line


@dataclass
class ExtractionArguments:
    target_model: str = field(metadata={"help": "The target: a folder or a name on the Hub."})
    dataset_name: str = field(metadata={"help": "A file, a folder, or a name on the Hub."})
    output_dir: str = field(metadata={"help": "Where the features go."})
    target_dtype: str = field(default="auto", metadata={"help": "The target's precision."})
    dataset_split: str = "train"
    chat_template: Path | None = field(default=None, metadata={"help": "A file with a template for the tokenizer."})
    max_length: int = field(default=2048, metadata={"help": "Longest row in tokens."})
    packing: bool = field(default=True, metadata={"help": "Put several texts into a row."})
    dtype: str = field(default="bfloat16", metadata={"help": "Of the features: bfloat16, float16 or float32."})
    batch_size: int = field(default=4, metadata={"help": "Rows that the target reads at a time."})
    target_layer_ids: list[int] | None = field(
        default=None,
        metadata={"help": "Layers whose states are kept, too, for a drafter that reads them; -1 is the last one."},
    )


def main() -> None:
    (args,) = HfArgumentParser(ExtractionArguments).parse_args_into_dataclasses()
    with told_in_one_line("extract_features.py"):
        extract(args)


def extract(args: ExtractionArguments) -> None:
    state = PartialState()
    target = AutoModelForCausalLM.from_pretrained(args.target_model, dtype=args.target_dtype).to(state.device)
    tokenizer = AutoTokenizer.from_pretrained(args.target_model)
    if args.chat_template is not None:
        tokenizer.chat_template = read_text(args.chat_template)
    with state.main_process_first():
        dataset, report = prepare_dataset(
            load_conversations(args.dataset_name, args.dataset_split),
            tokenizer,
            target.config,
            max_length=args.max_length,
            packing=args.packing,
        )
    dtype = getattr(torch, args.dtype)
    state.print(report)
    layers = args.target_layer_ids
    num_bytes = cache_size(dataset, target.config, dtype, layers)
    state.print(f"the features take {num_bytes / 1e9:.2f} GB in {args.output_dir}")
    write_feature_cache(
        dataset, target, tokenizer, args.output_dir, dtype=dtype, batch_size=args.batch_size, target_layer_ids=layers
    )
    state.destroy_process_group()


if __name__ == "__main__":
    main()
