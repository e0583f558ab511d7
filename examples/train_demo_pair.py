"""Trains the demo pair from nothing: a byte-level BPE tokenizer, a small Llama target, and a Gumiho drafter on it.

    python examples/train_demo_pair.py --output_dir demo_pair

The text is the source of the Python standard library that runs this script. Every stage leaves its result in
`--work_dir` and is skipped when the result is there, and both trainings go on from their newest checkpoint, so a run
that was stopped is continued by starting it again.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import stdlib_corpus as corpus
import torch
from transformers import (
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class DemoPairArguments:
    output_dir: Path = field(default=Path("demo_pair"), metadata={"help": "Receives `target` and `gumiho`."})
    work_dir: Path = field(default=Path("demo_pair_work"), metadata={"help": "Checkpoints and intermediate results."})
    library: Path | None = field(default=None, metadata={"help": "A standard library's folder (default: this one's)."})
    seed: int = 0
    held_out_one_in: int = field(default=20, metadata={"help": "One file in this many is held out."})
    save_steps: int = 250

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 20
    num_attention_heads: int = 3
    max_position_embeddings: int = 4096

    target_steps: int = 2500
    target_batch_size: int = 4
    target_sequence_length: int = 1024
    target_learning_rate: float = 3e-3


def read_corpus(args: DemoPairArguments) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the training files and the held-out files, as texts keyed by relative path."""
    texts = corpus.read_library(args.library)
    held_out = {name: text for name, text in texts.items() if corpus.is_held_out(name, args.held_out_one_in)}
    return {name: text for name, text in texts.items() if name not in held_out}, held_out


def prepare_tokenizer(args: DemoPairArguments, train_texts: list[str]) -> PreTrainedTokenizerFast:
    """Trains the tokenizer, or loads the one that an earlier run left."""
    folder = args.output_dir / "target"
    if not (folder / "tokenizer.json").exists():
        tokenizer = corpus.train_tokenizer(train_texts, args.vocab_size, args.max_position_embeddings)
        tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def training_arguments(args: DemoPairArguments, name: str, **overrides) -> TrainingArguments:
    """The settings that both trainings share: AdamW with a warm-up and a cosine, bf16 autocast, resumable."""
    defaults = {
        "output_dir": str(args.work_dir / name),
        "seed": args.seed,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.05},
        "adam_beta2": 0.95,
        "logging_steps": 20,
        "save_steps": args.save_steps,
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": args.save_steps,
        "report_to": "none",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**(defaults | overrides))


def train_target(
    args: DemoPairArguments, tokenizer: PreTrainedTokenizerFast, train: np.ndarray, held_out: np.ndarray
) -> LlamaForCausalLM:
    """Trains the target, or loads the one that an earlier run left. Returns it in float32."""
    folder = args.output_dir / "target"
    if (folder / "model.safetensors").exists():
        return LlamaForCausalLM.from_pretrained(folder, dtype="float32")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        max_position_embeddings=args.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    trainer = Trainer(
        model=model,
        args=training_arguments(
            args,
            "target",
            max_steps=args.target_steps,
            warmup_steps=100,
            per_device_train_batch_size=args.target_batch_size,
            per_device_eval_batch_size=args.target_batch_size,
            learning_rate=args.target_learning_rate,
            weight_decay=0.1,
        ),
        train_dataset=corpus.TokenWindows(train, args.target_sequence_length),
        eval_dataset=corpus.TokenWindows(held_out[: 64 * args.target_sequence_length], args.target_sequence_length),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(trainer.args.output_dir))
    model.bfloat16().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype="float32")


def main() -> None:
    (args,) = HfArgumentParser(DemoPairArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    train_texts, held_out_texts = read_corpus(args)
    tokenizer = prepare_tokenizer(args, list(train_texts.values()))
    train = corpus.encode_texts(tokenizer, list(train_texts.values()))
    held_out = corpus.encode_texts(tokenizer, list(held_out_texts.values()))
    print(f"{len(train_texts)} files, {train.size:,} tokens; held out: {len(held_out_texts)}, {held_out.size:,} tokens")
    train_target(args, tokenizer, train, held_out)


if __name__ == "__main__":
    main()
