"""Trains a small ordinary language model on the demo pair's target: a draft model for transformers' own assisted
generation, which `gumiho benchmark` compares with.

    python examples/demo_pair/train_draft_model.py --output_dir examples/demo_pair

It reads the target that `train_demo_pair.py` wrote into `--output_dir`, and the same text. Stages are skipped if their
result is in `--work_dir`. So you can stop the script and start it again.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import stdlib_corpus as corpus
import torch
from torch.nn import functional
from train_demo_pair import (
    DemoPairArguments,
    generate_rows,
    mix_rows,
    prepare_tokenizer,
    read_corpus,
    train_target,
    training_arguments,
)
from transformers import HfArgumentParser, LlamaForCausalLM, Trainer, set_seed

from transformers_gumiho.training import last_complete_checkpoint


# Transformers' defaults, 20 tokens as long as each has a probability of 0.4, stop too early for this model, which is
# unsure wherever the target is. A length that follows the acceptance decodes faster; see the pair's README.
DECODING = {
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic_transient",
    "assistant_confidence_threshold": 0.0,
}


@dataclass
class DraftModelArguments(DemoPairArguments):
    work_dir: Path = field(default=Path("draft_model_work"), metadata={"help": "Checkpoints and generated rows."})
    generated_rows: int = field(default=1024, metadata={"help": "Rows of text that the target writes itself."})
    eval_rows: int = field(
        default=128, metadata={"help": "Rows that it writes after held-out text, half of them greedily."}
    )
    generated_share: float = field(default=0.6, metadata={"help": "Share of generated rows in an epoch."})
    draft_num_hidden_layers: int = 2
    draft_steps: int = 350
    draft_learning_rate: float = 3e-3


class DistillationTrainer(Trainer):
    """Trains a model on the distribution of the target after every token: far more to learn from than the token."""

    target: LlamaForCausalLM

    def compute_loss(
        self, model: LlamaForCausalLM, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        with torch.no_grad():
            wanted = self.target(inputs["input_ids"]).logits.float().log_softmax(-1)
        outputs = model(inputs["input_ids"])
        drafted = outputs.logits.float().log_softmax(-1)
        loss = functional.kl_div(drafted.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)
        return (loss, outputs) if return_outputs else loss


def make_draft_model(args: DraftModelArguments, target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Returns an untrained model of the target's width and vocabulary that starts from the target's embedding."""
    config = type(target.config).from_dict(
        target.config.to_dict() | {"num_hidden_layers": args.draft_num_hidden_layers}
    )
    model = LlamaForCausalLM(config)
    model.get_input_embeddings().load_state_dict(target.get_input_embeddings().state_dict())
    return model


def held_out_rows(args: DraftModelArguments, target: LlamaForCausalLM, held_out: np.ndarray) -> np.ndarray:
    """Returns what the target writes after pieces of held-out text."""
    args = replace(
        args,
        work_dir=args.work_dir / "held_out",
        generated_rows=args.eval_rows,
        generated_batch_size=args.eval_rows // 2,
    )
    args.work_dir.mkdir(exist_ok=True)
    return generate_rows(args, target, held_out)


def train_draft_model(
    args: DraftModelArguments, target: LlamaForCausalLM, train_rows: np.ndarray, eval_rows: np.ndarray
) -> LlamaForCausalLM:
    """Trains the draft model, or goes on from its newest checkpoint. Returns it in the precision it is shipped in."""
    model = make_draft_model(args, target)
    trainer = DistillationTrainer(
        model=model,
        args=training_arguments(
            args,
            "draft_model",
            max_steps=args.draft_steps,
            warmup_steps=50,
            per_device_train_batch_size=args.drafter_batch_size,
            per_device_eval_batch_size=args.drafter_batch_size,
            learning_rate=args.draft_learning_rate,
            prediction_loss_only=True,
        ),
        train_dataset=corpus.TokenWindows(train_rows, args.drafter_sequence_length),
        eval_dataset=corpus.TokenWindows(eval_rows, args.drafter_sequence_length),
    )
    trainer.target = target
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(trainer.args.output_dir))
    print(trainer.evaluate())
    model.config.use_cache = True  # the Trainer switches it off
    return model.bfloat16()


def main() -> None:
    (args,) = HfArgumentParser(DraftModelArguments).parse_args_into_dataclasses()
    folder = args.output_dir / "draft_model"
    if (folder / "model.safetensors").exists():
        return
    set_seed(args.seed)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    train_texts, held_out_texts = read_corpus(args)
    tokenizer = prepare_tokenizer(args, list(train_texts.values()))
    train = corpus.encode_texts(tokenizer, list(train_texts.values()))
    held_out = corpus.encode_texts(tokenizer, list(held_out_texts.values()))
    # In the precision of the weights: twice as fast on a CPU.
    target = train_target(args, tokenizer, train, held_out).bfloat16().eval()
    eval_rows = held_out_rows(args, target, held_out)
    rows = mix_rows(replace(args, drafter_steps=args.draft_steps), train, generate_rows(args, target, train))
    model = train_draft_model(args, target, rows, eval_rows)
    model.generation_config.update(**DECODING)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
