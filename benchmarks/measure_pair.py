"""Measures decoding with and without the drafter, on the demo pair or another pair that was trained as it was.

    python benchmarks/measure_pair.py

`gumiho benchmark` with the two ways of decoding alone, greedily and in float32: they take turns, prompt by prompt.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, logging

from transformers_gumiho import GumihoModel
from transformers_gumiho.benchmarking import (
    BenchmarkSettings,
    DecodingMode,
    Question,
    SummaryRow,
    read_questions,
    run_benchmark,
    summarize,
)
from transformers_gumiho.benchmarking.report import markdown
from transformers_gumiho.pairs import DraftingArguments, load_pair


@dataclass
class MeasurementArguments(DraftingArguments):
    demo_pair: Path = field(
        default=Path(__file__).parent.parent / "examples" / "demo_pair",
        metadata={"help": "Folder with `target`, `gumiho` and prompts."},
    )
    num_prompts: int = 12
    max_new_tokens: int = 128
    repeats: int = field(default=3, metadata={"help": "Times that each prompt is decoded in each way."})
    full_tree_attention: bool = field(
        default=True, metadata={"help": "Whether nodes are chosen among all recombinations of the heads' tokens."}
    )


def measure(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gumiho: GumihoModel,
    questions: list[Question],
    max_new_tokens: int,
) -> list[SummaryRow]:
    """Returns the rows of plain decoding and of the drafter over all questions."""
    modes = [DecodingMode("plain"), DecodingMode("gumiho", {"assistant_model": gumiho})]
    settings = BenchmarkSettings(max_new_tokens=max_new_tokens)
    return summarize(run_benchmark(target, tokenizer, questions, modes, settings))[:2]


def main() -> None:
    (args,) = HfArgumentParser(MeasurementArguments, description=__doc__).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    # The weights are bf16; float32 keeps two orders of summation from changing a near-tie.
    folders = {"target": str(args.demo_pair / "target"), "assistant": str(args.demo_pair / "gumiho")}
    target, tokenizer, gumiho = load_pair(replace(args, **folders, dtype="float32"))
    gumiho.generation_config.full_tree_attention = args.full_tree_attention
    questions = read_questions(str(args.demo_pair / "prompts.jsonl"), num_questions=args.num_prompts)
    repeated = [replace(question, name=f"{question.name}, {i}") for i in range(args.repeats) for question in questions]
    print(markdown(measure(target, tokenizer, gumiho, repeated, args.max_new_tokens)))


if __name__ == "__main__":
    main()
