"""Makes training data without data: the target writes its own users' prompts, and answers them.

    python examples/synthesize_data.py --target_model NAME --num_prompts 10000 --output_file answers.jsonl
    python examples/train_gumiho.py --target_model NAME --dataset_name answers.jsonl --output_dir gumiho

Started again after it was stopped, it goes on where it was. With `--feature_cache features` the states that the target
computes as it answers are kept, and training needs no second pass (`--features_dir features`). With
`--endpoint http://localhost:8000` a server runs the target (vLLM, TGI, `transformers serve`); the variable
`ENDPOINT_API_KEY` holds the key, where it wants one.
"""

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from transformers_gumiho.text_files import read_text
from transformers_gumiho.training import (
    Endpoint,
    EndpointError,
    SynthesisSettings,
    read_questions,
    synthesize_dataset,
    synthesize_from_endpoint,
)
from transformers_gumiho.user_errors import told_in_one_line


@dataclass
class SynthesisArguments:
    target_model: str = field(metadata={"help": "The target: a folder or a name on the Hub."})
    num_prompts: int = field(metadata={"help": "Prompts that the target writes itself."})
    output_file: str = field(metadata={"help": "The new dataset, as JSONL."})
    dtype: str = field(default="auto", metadata={"help": "The target's precision."})
    chat_template: Path | None = field(default=None, metadata={"help": "A file with a template for the tokenizer."})
    system_prompts: Path | None = field(default=None, metadata={"help": "A file with a system prompt in each line."})
    openings: Path | None = field(
        default=None, metadata={"help": "A file with a user's first words in each line; \\n stands for a line break."}
    )
    questions: str | None = field(default=None, metadata={"help": "A JSONL file with prompts of your own."})
    num_questions: int | None = field(default=None, metadata={"help": "How many of them to answer. All by default."})
    batch_size: int = field(default=32, metadata={"help": "Prompts or answers to write at a time."})
    max_prompt_tokens: int = field(default=256, metadata={"help": "Tokens of a self-written prompt, at most."})
    max_new_tokens: int = field(default=512, metadata={"help": "Tokens of an answer, at most."})
    sampled_share: float = field(default=0.25, metadata={"help": "Share of the answers that are sampled."})
    temperature: float = field(default=1.0, metadata={"help": "For prompts and sampled answers."})
    top_p: float = field(default=0.95, metadata={"help": "Mass of the tokens that are sampled from."})
    seed: int = 0
    feature_cache: str | None = field(default=None, metadata={"help": "A folder for the target's states."})
    endpoint: str | None = field(default=None, metadata={"help": "The address of a server that runs the target."})
    endpoint_model: str | None = field(default=None, metadata={"help": "Its name there. By default target_model."})
    concurrency: int = field(default=32, metadata={"help": "Requests to the server at a time."})

    @property
    def settings(self) -> SynthesisSettings:
        return SynthesisSettings(**{item.name: getattr(self, item.name) for item in fields(SynthesisSettings)})


def main() -> None:
    (args,) = HfArgumentParser(SynthesisArguments).parse_args_into_dataclasses()
    with told_in_one_line("synthesize_data.py", EndpointError):
        synthesize(args)


def synthesize(args: SynthesisArguments) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.target_model)
    if args.chat_template is not None:
        tokenizer.chat_template = read_text(args.chat_template)
    openings = [line.strip().replace("\\n", "\n") for line in read_lines(args.openings)]
    questions = read_questions(args.questions, args.num_questions) if args.questions else []
    prompts = {"system_prompts": read_lines(args.system_prompts), "openings": openings, "questions": questions}
    if args.endpoint is not None:
        if args.feature_cache is not None:
            raise SystemExit("A server does not give its states: leave --feature_cache or --endpoint away.")
        endpoint = Endpoint(
            args.endpoint,
            args.endpoint_model or args.target_model,
            concurrency=args.concurrency,
            api_key=os.environ.get("ENDPOINT_API_KEY"),
        )
        synthesize_from_endpoint(endpoint, tokenizer, args.output_file, args.settings, **prompts)
        return
    target = AutoModelForCausalLM.from_pretrained(
        args.target_model, dtype=args.dtype, device_map="auto" if torch.cuda.is_available() else None
    )
    synthesize_dataset(target, tokenizer, args.output_file, args.settings, feature_cache=args.feature_cache, **prompts)


def read_lines(path: Path | None) -> list[str]:
    lines = read_text(path).splitlines() if path else []
    return [line for line in lines if line.strip()]


if __name__ == "__main__":
    main()
