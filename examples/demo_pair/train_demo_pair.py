"""Trains the demo pair from scratch: a byte-level BPE tokenizer, a small Llama target, and a Gumiho drafter on it.

    python examples/demo_pair/train_demo_pair.py --output_dir demo_pair

The text is the source of the Python standard library that runs this script. Every stage writes its result into
`--work_dir` and is skipped if the result exists, and both trainings continue from their newest checkpoint. So you can
stop the script and start it again.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import stdlib_corpus as corpus
import torch
from tqdm import tqdm
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

from transformers_gumiho import GumihoModel
from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments, last_complete_checkpoint


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

    target_steps: int = 2300
    target_batch_size: int = 4
    target_sequence_length: int = 1024
    target_learning_rate: float = 3e-3

    generated_rows: int = field(default=4096, metadata={"help": "Rows of text that the target writes itself."})
    generated_batch_size: int = 128
    generated_prompt_length: int = 64

    drafter_steps: int = 2800
    drafter_batch_size: int = 16
    drafter_sequence_length: int = 256
    drafter_learning_rate: float = 2e-3
    generated_share: float = field(default=0.8, metadata={"help": "Share of generated rows in a drafter's epoch."})
    drafter_ce_weight: float = field(default=1.0, metadata={"help": "Weight of the soft cross-entropies."})
    drafter_parallel_weight: float = field(default=1 / 9, metadata={"help": "Weight of the parallel heads' loss."})
    unroll_serial_head: bool = field(default=False, metadata={"help": "See GumihoTrainingArguments."})

    num_prompts: int = field(default=64, metadata={"help": "Held-out prompts to write for measuring."})
    prompt_length: int = 128


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


def training_arguments(
    args: DemoPairArguments, name: str, arguments: type[TrainingArguments] = TrainingArguments, **overrides: Any
) -> TrainingArguments:
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
    return arguments(**(defaults | overrides))


def train_target(
    args: DemoPairArguments, tokenizer: PreTrainedTokenizerFast, train: np.ndarray, held_out: np.ndarray
) -> LlamaForCausalLM:
    """Trains the target, or loads the one that an earlier run left. Returns it in float32."""
    folder = args.output_dir / "target"
    if (folder / "model.safetensors").exists():
        # The shipped weights are bf16; everything after this is to fit what is shipped.
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
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(trainer.args.output_dir))
    model.config.use_cache = True  # the Trainer switches it off
    model.bfloat16().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype="float32")


@torch.inference_mode()
def generate_rows(args: DemoPairArguments, target: LlamaForCausalLM, train: np.ndarray) -> np.ndarray:
    """
    Lets the target continue random pieces of the training text, greedily and by sampling in turn, because a drafter
    has to imitate what the target writes. Returns `[generated_rows, drafter_sequence_length]`; resumes by batch.
    """
    folder = args.work_dir / "generated"
    folder.mkdir(exist_ok=True)
    batches = []
    for index in tqdm(range(args.generated_rows // args.generated_batch_size), desc="target writes", unit="batch"):
        path = folder / f"{index:04d}.npy"
        if not path.exists():
            generator = np.random.default_rng([args.seed, index])
            starts = generator.integers(0, train.size - args.generated_prompt_length, args.generated_batch_size)
            prompts = np.stack([train[start : start + args.generated_prompt_length] for start in starts])
            torch.manual_seed(args.seed + index)
            rows = target.generate(
                torch.from_numpy(prompts.astype(np.int64)).to(target.device),
                do_sample=index % 2 == 1,
                top_k=0,
                max_length=args.drafter_sequence_length,
                min_length=args.drafter_sequence_length,
            )
            partial = path.with_suffix(".partial.npy")
            np.save(partial, rows.cpu().numpy().astype(train.dtype))
            partial.rename(path)
        batches.append(np.load(path))
    return np.concatenate(batches)


def mix_rows(args: DemoPairArguments, train: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """Returns the rows of one epoch: generated ones, repeated to their share, and random windows of the text."""
    num_rows = args.drafter_steps * args.drafter_batch_size
    num_generated = round(num_rows * args.generated_share)
    generator = np.random.default_rng(args.seed)
    length = args.drafter_sequence_length
    starts = generator.integers(0, train.size - length, num_rows - num_generated)
    windows = train[starts[:, None] + np.arange(length)]
    repeated = generated[np.resize(generator.permutation(len(generated)), num_generated)]
    return np.concatenate([windows, repeated])


def train_drafter(
    args: DemoPairArguments, target: LlamaForCausalLM, train: np.ndarray, generated: np.ndarray, held_out: np.ndarray
) -> None:
    """Trains the drafter, unless an earlier run finished it."""
    folder = args.output_dir / "gumiho"
    if (folder / "model.safetensors").exists():
        return
    drafter = GumihoModel.from_target(target)
    tokenizer = AutoTokenizer.from_pretrained(args.output_dir / "target")
    length = args.drafter_sequence_length
    trainer = GumihoTrainer(
        drafter,
        training_arguments(
            args,
            "gumiho",
            GumihoTrainingArguments,
            max_steps=args.drafter_steps,
            warmup_steps=100,
            per_device_train_batch_size=args.drafter_batch_size,
            per_device_eval_batch_size=args.drafter_batch_size,
            learning_rate=args.drafter_learning_rate,
            serial_ce_weight=args.drafter_ce_weight,
            parallel_ce_weight=args.drafter_ce_weight,
            parallel_ce_start=0,
            parallel_weight=args.drafter_parallel_weight,
            unroll_serial_head=args.unroll_serial_head,
            eval_strategy="steps",
            eval_steps=args.save_steps,
        ),
        # In the precision of the weights: twice as fast on a CPU.
        target=target.bfloat16(),
        train_dataset=corpus.TokenWindows(mix_rows(args, train, generated), length),
        eval_dataset=corpus.TokenWindows(held_out[: 128 * length], length),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(trainer.args.output_dir))
    drafter.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_prompts(args: DemoPairArguments, tokenizer: PreTrainedTokenizerFast, held_out: dict[str, str]) -> None:
    """
    Writes prompts for measuring, with their categories: pieces of held-out files of `prompt_length` tokens, at most
    one of each file.
    """
    path = args.output_dir / "prompts.jsonl"
    if path.exists():
        return
    generator = random.Random(args.seed)
    names = sorted(held_out)
    generator.shuffle(names)
    with path.open("w", encoding="utf-8") as file:
        written = 0
        for name in names:
            lines = held_out[name].splitlines(keepends=True)
            text = "".join(lines[generator.randrange(len(lines)) if lines else 0 :])
            token_ids = tokenizer(text)["input_ids"][: args.prompt_length]
            if len(token_ids) < args.prompt_length or written == args.num_prompts:
                continue
            prompt = tokenizer.decode(token_ids)
            row = {"file": name, "category": corpus.prompt_category(name, prompt), "text": prompt}
            file.write(json.dumps(row) + "\n")
            written += 1


def main() -> None:
    (args,) = HfArgumentParser(DemoPairArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    train_texts, held_out_texts = read_corpus(args)
    tokenizer = prepare_tokenizer(args, list(train_texts.values()))
    train = corpus.encode_texts(tokenizer, list(train_texts.values()))
    held_out = corpus.encode_texts(tokenizer, list(held_out_texts.values()))
    print(
        f"{len(train_texts)} files, {train.size:,} tokens; held out: {len(held_out_texts)}, {held_out.size:,} tokens"
    )
    write_prompts(args, tokenizer, held_out_texts)
    target = train_target(args, tokenizer, train, held_out)
    generated = generate_rows(args, target.eval(), train)
    train_drafter(args, target, train, generated, held_out)


if __name__ == "__main__":
    main()
