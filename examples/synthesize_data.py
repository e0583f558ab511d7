"""Makes training data without data: the target writes its own users' prompts, and answers them.

    python examples/synthesize_data.py --target_model NAME --num_prompts 10000 --output_file answers.jsonl
    python examples/train_gumiho.py --target_model NAME --dataset_name answers.jsonl --output_dir gumiho

Started again after it was stopped, it goes on where it was.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from transformers_gumiho.training.synthesis import SynthesisSettings, read_questions, synthesize_dataset


@dataclass
class SynthesisArguments:
    target_model: str = field(metadata={"help": "The target: a folder or a name on the Hub."})
    num_prompts: int = field(metadata={"help": "Prompts that the target writes itself."})
    output_file: str = field(metadata={"help": "The new dataset, as JSONL."})
    dtype: str = field(default="auto", metadata={"help": "The target's precision."})
    chat_template: Path | None = field(default=None, metadata={"help": "A file with a template for the tokenizer."})
    system_prompts: Path | None = field(default=None, metadata={"help": "A file with a system prompt in each line."})
    questions: str | None = field(default=None, metadata={"help": "A JSONL file with prompts of your own."})
    num_questions: int | None = field(default=None, metadata={"help": "How many of them to answer. All by default."})
    batch_size: int = field(default=32, metadata={"help": "Prompts or answers to write at a time."})
    max_prompt_tokens: int = field(default=256, metadata={"help": "Tokens of a self-written prompt, at most."})
    max_new_tokens: int = field(default=512, metadata={"help": "Tokens of an answer, at most."})
    sampled_share: float = field(default=0.25, metadata={"help": "Share of the answers that are sampled."})
    temperature: float = field(default=1.0, metadata={"help": "For prompts and sampled answers."})
    top_p: float = field(default=0.95, metadata={"help": "Mass of the tokens that are sampled from."})
    seed: int = 0


def main() -> None:
    (args,) = HfArgumentParser(SynthesisArguments).parse_args_into_dataclasses()
    target = AutoModelForCausalLM.from_pretrained(
        args.target_model, dtype=args.dtype, device_map="auto" if torch.cuda.is_available() else None
    )
    tokenizer = AutoTokenizer.from_pretrained(args.target_model)
    if args.chat_template is not None:
        tokenizer.chat_template = args.chat_template.read_text(encoding="utf-8")
    systems = args.system_prompts.read_text(encoding="utf-8").splitlines() if args.system_prompts else []
    names = ("num_prompts", "batch_size", "max_prompt_tokens", "max_new_tokens", "sampled_share")
    settings = {name: getattr(args, name) for name in (*names, "temperature", "top_p", "seed")}
    synthesize_dataset(
        target,
        tokenizer,
        args.output_file,
        SynthesisSettings(**settings),
        system_prompts=[line for line in systems if line.strip()],
        questions=read_questions(args.questions, args.num_questions) if args.questions else [],
    )


if __name__ == "__main__":
    main()
