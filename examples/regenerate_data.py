"""Lets a target answer a dataset itself, because a drafter has to imitate what the target says.

    python examples/regenerate_data.py --target_model NAME --dataset_name NAME_OR_FILE --output_file answers.jsonl
    python examples/train_gumiho.py --target_model NAME --dataset_name answers.jsonl --output_dir gumiho

Started again after it was stopped, it goes on where it was.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from transformers_gumiho.text_files import read_text
from transformers_gumiho.training import load_conversations, regenerate_dataset
from transformers_gumiho.user_errors import told_in_one_line


@dataclass
class RegenerationArguments:
    target_model: str = field(metadata={"help": "The target: a folder or a name on the Hub."})
    dataset_name: str = field(metadata={"help": "A file, a folder, or a name on the Hub."})
    output_file: str = field(metadata={"help": "The new dataset, as JSONL."})
    target_dtype: str = field(default="auto", metadata={"help": "The target's precision."})
    dataset_split: str = "train"
    chat_template: Path | None = field(default=None, metadata={"help": "A file with a template for the tokenizer."})
    temperature: float = field(default=0.0, metadata={"help": "0 answers greedily, anything above samples."})
    batch_size: int = field(default=16, metadata={"help": "Conversations to answer at a time."})
    max_length: int = field(default=2048, metadata={"help": "Tokens of a conversation, at most."})
    num_prompt_tokens: int = field(default=64, metadata={"help": "Tokens of a raw text that the target continues."})
    seed: int = 0


def main() -> None:
    (args,) = HfArgumentParser(RegenerationArguments).parse_args_into_dataclasses()
    with told_in_one_line("regenerate_data.py"):
        regenerate(args)


def regenerate(args: RegenerationArguments) -> None:
    target = AutoModelForCausalLM.from_pretrained(
        args.target_model, dtype=args.target_dtype, device_map="auto" if torch.cuda.is_available() else None
    )
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if args.temperature else {}
    tokenizer = AutoTokenizer.from_pretrained(args.target_model)
    if args.chat_template is not None:
        tokenizer.chat_template = read_text(args.chat_template)
    regenerate_dataset(
        load_conversations(args.dataset_name, args.dataset_split),
        target,
        tokenizer,
        args.output_file,
        batch_size=args.batch_size,
        max_length=args.max_length,
        num_prompt_tokens=args.num_prompt_tokens,
        seed=args.seed,
        **sampling,
    )


if __name__ == "__main__":
    main()
