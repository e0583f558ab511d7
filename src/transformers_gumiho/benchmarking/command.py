"""`gumiho benchmark`: compares all ways of decoding a target, and writes what it finds."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ..measuring.conditions import measuring_conditions
from ..measuring.loading import load_pair
from ..measuring.prompts import first_of_each_category, read_questions
from ..model.modeling_gumiho import GumihoModel
from .modes import DecodingMode, choose_modes, decoding_modes
from .report import markdown, write_json
from .runner import BenchmarkSettings, run_benchmark
from .sample_file import SampleFile
from .summary import SummaryRow, summarize


@dataclass
class BenchmarkArguments:
    """The options of `gumiho benchmark`; [`benchmark`] takes them, too."""

    target: str = field(metadata={"help": "The target: a folder or a name on the Hub."})
    assistant: str = field(metadata={"help": "The Gumiho drafter: a folder or a name on the Hub."})
    prompts: str = field(metadata={"help": "A JSONL file with `turns`, `prompt` or `text`, or a dataset."})
    output_dir: str = field(default="benchmark", metadata={"help": "Receives samples, summary, table and pictures."})
    column: str | None = field(default=None, metadata={"help": "Take the prompts from this column."})
    num_prompts: int | None = field(default=None, metadata={"help": "Use only this many (default: all)."})
    prompts_per_category: int | None = field(
        default=None, metadata={"help": "Use only this many of each category (default: all)."}
    )
    modes: list[str] = field(
        default_factory=list, metadata={"help": "Beside plain decoding, only these, by their names in the tables."}
    )
    draft_model: str | None = field(
        default=None, metadata={"help": "A small language model for transformers' own assisted generation."}
    )
    temperatures: list[float] = field(default_factory=lambda: [0.0], metadata={"help": "0 is greedy."})
    batch_sizes: list[int] = field(default_factory=lambda: [1], metadata={"help": "Prompts to decode at once."})
    tree_sizes: list[int] = field(
        default_factory=list, metadata={"help": "Also decode with trees of these many drafted tokens."}
    )
    compiled: bool = field(
        default=False, metadata={"help": "Also decode with compiled models, with the drafter and without."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens to generate for each prompt."})
    num_assistant_tokens: int | None = field(default=None, metadata={"help": "Instead of the drafter's own setting."})
    branching_factor: int | None = field(default=None, metadata={"help": "Instead of the drafter's own setting."})
    dtype: str = field(default="auto", metadata={"help": "Precision of all models."})
    device_map: str | None = field(default=None, metadata={"help": "Where the target goes (default: one device)."})
    seed: int = field(default=0, metadata={"help": "For sampling."})
    resume: bool = field(
        default=False,
        metadata={"help": "Keep what an earlier run of the same settings measured; more prompts may be asked for."},
    )


def benchmark(args: BenchmarkArguments) -> list[SummaryRow]:
    """
    Decodes the prompts in every mode in turns, and writes `samples.jsonl` (as it goes), `summary.json`, `summary.md`
    and pictures into `args.output_dir`. Interrupted, it reports what it has, and with `args.resume` goes on.

    Returns:
        The rows of the summary.

    Raises:
        SystemExit: It was interrupted before anything was measured.
        ValueError: There is no way of decoding of a name in `args.modes`, or it is to resume what was measured with
            other settings.
    """
    # Not needed by those who only tune.
    from .plots import plot_summary

    folder = Path(args.output_dir)
    questions = read_questions(args.prompts, column=args.column, num_questions=args.num_prompts)
    if args.prompts_per_category is not None:
        questions = first_of_each_category(questions, args.prompts_per_category)
    folder.mkdir(parents=True, exist_ok=True)
    target, tokenizer, drafter = load_pair(args.target, args.assistant, args.dtype, args.device_map)
    for name in ("num_assistant_tokens", "branching_factor"):
        if getattr(args, name) is not None:
            setattr(drafter.generation_config, name, getattr(args, name))
    draft_model = None
    if args.draft_model is not None:
        draft_model = AutoModelForCausalLM.from_pretrained(
            args.draft_model, dtype=target.dtype, device_map=target.device
        )
    modes = decoding_modes(drafter, draft_model, args.tree_sizes, args.compiled)
    if args.modes:
        modes = choose_modes(modes, args.modes)
    samples = run_benchmark(
        target,
        tokenizer,
        questions,
        modes,
        BenchmarkSettings(tuple(args.temperatures), tuple(args.batch_sizes), args.max_new_tokens, args.seed),
        SampleFile(folder / "samples.jsonl", _settings_of_samples(args, modes, target, drafter), args.resume),
    )
    if not samples:
        raise SystemExit("Stopped before anything was measured.")
    rows = summarize(samples)
    write_json(rows, folder / "summary.json", arguments=asdict(args))
    (folder / "summary.md").write_text(markdown(rows), encoding="utf-8")
    plot_summary(rows, folder)
    return rows


def _settings_of_samples(
    args: BenchmarkArguments, modes: list[DecodingMode], target: PreTrainedModel, drafter: GumihoModel
) -> dict[str, Any]:
    """Returns what a sample depends on, besides its question, its temperature and the size of its batch."""
    return measuring_conditions(target, drafter) | {
        "modes": [mode.name for mode in modes],
        "draft_model": args.draft_model,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
    }
