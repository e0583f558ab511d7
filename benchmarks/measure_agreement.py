"""Measures how often each draft of a drafter is the target's own choice, on the target's answers to questions.

    python benchmarks/measure_agreement.py --target target --assistants examples/smollm2/gumiho \
        --prompts examples/smollm2/prompts.jsonl --dtype bfloat16

The target answers the first turns greedily, by plain decoding. For each token of an answer but the first, the draft of
depth k is what a drafter says k tokens before it, given that the text up to there is the target's: what
`eval_agreement_k` is in training, by category. No tree, no clock, so drafters can be compared while a machine is busy.
"""

import tempfile
from dataclasses import dataclass, field

import torch
from datasets import Dataset, disable_progress_bars
from demo_pair import parse
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

from transformers_gumiho import GumihoModel
from transformers_gumiho.tools.measuring.prompts import Question, read_prompts
from transformers_gumiho.tools.measuring.timing import pad_left
from transformers_gumiho.tools.pairs import PairArguments, load_target, prompts_field
from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments
from transformers_gumiho.training.data.open_text import encode_turn


@dataclass(kw_only=True)
class AgreementArguments(PairArguments):
    assistants: list[str] = field(metadata={"help": "Drafters for it."})
    prompts: str = prompts_field()
    prompts_per_category: int = 12
    max_new_tokens: int = 128
    batch_size: int = 12


@torch.inference_mode()
def answer(
    args: AgreementArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[Question]
) -> Dataset:
    """Returns a row for each question: its tokens and those of the target's answer, which count."""
    ends = target.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends], device=target.device)
    prompts = [encode_turn(tokenizer, question.turns[:1], []) for question in questions]
    rows: list[dict[str, list[int]]] = []
    for start in range(0, len(prompts), args.batch_size):
        batch = pad_left(prompts[start : start + args.batch_size], tokenizer.pad_token_id, target.device)
        length = batch["input_ids"].shape[1]
        new_tokens = target.generate(**batch, max_new_tokens=args.max_new_tokens, do_sample=False)[:, length:]
        is_end = torch.isin(new_tokens, ends)
        # The token that ends a text belongs to it; what follows is padding.
        lengths = (is_end.cumsum(-1) - is_end.long() == 0).sum(-1)
        for row, num_new in zip(new_tokens.tolist(), lengths.tolist(), strict=True):
            prompt = prompts[len(rows)]
            # A state counts where the token that it predicts is the answer's, too.
            mask = [0] * len(prompt) + [1] * (num_new - 1) + [0]
            rows.append({"input_ids": prompt + row[:num_new], "loss_mask": mask})
    return Dataset.from_list([row for row in rows if sum(row["loss_mask"])])


def main() -> None:
    args = parse(AgreementArguments, __doc__)
    disable_progress_bars()
    target, tokenizer = load_target(args if args.pair is None else args.resolved())
    questions = read_prompts(args.prompts, per_category=args.prompts_per_category)
    categories = dict.fromkeys(question.category for question in questions)
    asked = {name: [question for question in questions if question.category == name] for name in categories}
    answers = {name: answer(args, target, tokenizer, of_category) for name, of_category in asked.items()}
    for name in args.assistants:
        drafter = GumihoModel.from_pretrained(name, dtype=torch.float32)
        with tempfile.TemporaryDirectory() as folder:
            settings = GumihoTrainingArguments(
                output_dir=folder, per_device_eval_batch_size=args.batch_size, report_to="none", disable_tqdm=True,
                bf16=target.dtype is torch.bfloat16, use_cpu=target.device.type == "cpu",
                draft_vocabulary_size=len(drafter.generation_config.draft_vocabulary or []) or None,
            )  # fmt: skip
            trainer = GumihoTrainer(drafter, settings, target=target)
            trainer.remove_callback(PrinterCallback)
            depths = range(1, drafter.config.max_draft_depth + 1)
            print(f"\n{name}\n\n| category | tokens | {' | '.join(map(str, depths))} |\n|{'---|' * (len(depths) + 2)}")
            for category, rows in answers.items():
                found = trainer.evaluate(rows)
                shares = " | ".join(f"{found[f'eval_agreement_{depth}']:.3f}" for depth in depths)
                print(f"| {category} | {sum(map(sum, rows['loss_mask']))} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
