"""`gumiho benchmark`: compares all ways of decoding a target, and writes what it finds."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from transformers import AutoModelForCausalLM

from ..measuring.conditions import measuring_conditions
from ..measuring.journal import Journal
from ..measuring.prompts import read_questions
from ..pairs import DraftingArguments, load_pair, prompts_field
from ..target.placement import drafter_device
from .modes import choose_modes, decoding_modes
from .report import markdown, write_json
from .runner import BenchmarkSettings, run_benchmark
from .summary import SummaryRow, summarize


@dataclass(kw_only=True)
class BenchmarkArguments(DraftingArguments):
    """The options of `gumiho benchmark`; [`benchmark`] takes them, too. They need a pair, or target and assistant."""

    prompts: str = prompts_field()
    output_dir: str = field(default="benchmark", metadata={"help": "Folder for samples, summary, table and pictures."})
    column: str | None = field(
        default=None, metadata={"help": "Column that holds the prompts (default: `turns`, `prompt` or `text`)."}
    )
    num_prompts: int | None = field(default=None, metadata={"help": "Number of prompts (default: all)."})
    prompts_per_category: int | None = field(
        default=None, metadata={"help": "Number of prompts of each category (default: all)."}
    )
    modes: list[str] = field(
        default_factory=list, metadata={"help": "Modes to run besides plain, e.g. `gumiho` (default: all)."}
    )
    draft_model: str | None = field(
        default=None, metadata={"help": "Small language model for transformers' assisted generation."}
    )
    temperatures: list[float] = field(
        default_factory=lambda: [0.0], metadata={"help": "Sampling temperatures; 0 is greedy."}
    )
    batch_sizes: list[int] = field(default_factory=lambda: [1], metadata={"help": "Batch sizes."})
    tree_sizes: list[int] = field(
        default_factory=list, metadata={"help": "Also benchmark trees with these numbers of draft tokens."}
    )
    compiled: bool = field(
        default=False, metadata={"help": "Also benchmark compiled models, with and without the drafter."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Maximum number of tokens per prompt."})
    seed: int = field(default=0, metadata={"help": "Seed for sampling."})
    resume: bool = field(
        default=False,
        metadata={"help": "Continue an earlier run with the same settings; more prompts are allowed."},
    )


def benchmark(args: BenchmarkArguments) -> list[SummaryRow]:
    """
    Benchmarks a drafter against plain, prompt-lookup and assisted decoding, in turns, and writes `samples.jsonl`,
    `summary.json`, `summary.md` and pictures into `args.output_dir`. An interrupted run reports what it has, and
    `args.resume` continues it.

    Returns:
        The rows of the summary.

    Raises:
        SystemExit: The run was interrupted before anything was measured.
        ValueError: The options do not name both models, `args.modes` names an unknown mode, or `args.resume` finds a
            run with other settings.
    """
    # Not needed by those who only tune.
    from .plots import plot_summary

    folder = Path(args.output_dir)
    questions = read_questions(
        args.prompts,
        column=args.column,
        num_questions=args.num_prompts,
        per_category=args.prompts_per_category,
    )
    folder.mkdir(parents=True, exist_ok=True)
    target, tokenizer, drafter = load_pair(args)
    draft_model = None
    if args.draft_model is not None:
        draft_model = AutoModelForCausalLM.from_pretrained(
            args.draft_model, dtype=target.dtype, device_map=drafter_device(target)
        )
    modes = decoding_modes(drafter, draft_model, args.tree_sizes, args.compiled)
    if args.modes:
        modes = choose_modes(modes, args.modes)
    conditions = measuring_conditions(target, drafter)
    options = {name: getattr(args, name) for name in ("draft_model", "max_new_tokens", "seed")}
    journal_settings = conditions | {"modes": [mode.name for mode in modes]} | options
    samples = run_benchmark(
        target,
        tokenizer,
        questions,
        modes,
        BenchmarkSettings(tuple(args.temperatures), tuple(args.batch_sizes), args.max_new_tokens, args.seed),
        Journal(folder / "samples.jsonl", journal_settings, args.resume),
    )
    if not samples:
        raise SystemExit("Stopped before anything was measured.")
    rows = summarize(samples)
    write_json(rows, folder / "summary.json", environment=conditions, arguments=asdict(args))
    (folder / "summary.md").write_text(markdown(rows), encoding="utf-8")
    plot_summary(rows, folder)
    return rows
