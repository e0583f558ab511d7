"""`gumiho benchmark`: compares ways of decoding a target, and writes the results."""

import json
import platform
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from ...commands import REQUIRED, make_folder, option
from ...generation.verification.traits import input_device
from ...model.modeling_gumiho import GumihoModel
from ...training.data.fingerprint import model_fingerprint
from ...training.data.manifest import begin
from ...training.data.run_files import ask_before_deleting
from ..measuring.prompts import read_prompts
from ..pairs import DraftingArguments, load_pair, load_target, prompts_field
from .modes import decoding_modes
from .runner import run_benchmark
from .summary import Sample, SummaryRow, markdown, summarize


@dataclass(kw_only=True)
class BenchmarkArguments(DraftingArguments):
    """The options of `gumiho benchmark`."""

    prompts: str = prompts_field(REQUIRED)
    output_dir: str = option("Folder for samples, summary and table.", "benchmark")
    num_prompts: int | None = option("Number of prompts (default: all).", at_least=1)
    prompts_per_category: int | None = option("Number of prompts of each category (default: all).", at_least=1)
    modes: list[str] = option(
        "Modes to run besides plain (default: prompt lookup, gumiho, and gumiho with prompt lookup).", []
    )
    draft_model: str | None = option("Small language model for the mode `assisted generation`.")
    temperatures: list[float] = option("Sampling temperatures; 0 is greedy.", [0.0], at_least=0)
    batch_sizes: list[int] = option("Batch sizes.", [1], at_least=1)
    max_new_tokens: int = option("Maximum number of tokens per prompt.", 128, at_least=1)
    seed: int = option("Seed for sampling.", 0)
    restart: bool = option("Delete what an earlier run measured, and begin anew.", False)
    yes: bool = option("Delete it without asking.", False)


def benchmark(args: BenchmarkArguments) -> list[SummaryRow]:
    """
    Compares a drafter with plain decoding and prompt lookup, or other ways of decoding (`args.modes`), and writes
    samples and their summary into `args.output_dir`. The same options continue a stopped run, also with more prompts.

    Raises:
        KeyboardInterrupt: The run was interrupted.
        ValueError: `args.modes` names an unknown mode, or the folder holds a run with other settings.
    """
    folder = Path(args.output_dir)
    measured = folder / "samples.jsonl"
    if args.restart and measured.exists() and not args.yes:
        ask_before_deleting(f"--restart deletes {measured} ({measured.stat().st_size / 1e3:,.1f} kB)")
    questions = read_prompts(args.prompts, num_prompts=args.num_prompts, per_category=args.prompts_per_category)
    make_folder(folder)
    target, tokenizer, drafter = load_pair(args)
    modes = decoding_modes(drafter, args.modes, _load_draft_model(args, target))
    conditions = _conditions(target, drafter)
    options = {name: getattr(args, name) for name in ("draft_model", "max_new_tokens", "seed", "chat_template_kwargs")}
    options |= {"modes": [mode.name for mode in modes], "chat_template": tokenizer.chat_template}
    options["fields of a sample"] = [field.name for field in fields(Sample)]  # of this version
    if args.restart:
        measured.unlink(missing_ok=True)
    begin(measured, conditions | options, "Begin anew with --restart, or name another --output_dir.")
    samples: list[Sample] = []
    stopped = False
    try:
        for sample in run_benchmark(
            target, tokenizer, questions, modes, temperatures=args.temperatures, batch_sizes=args.batch_sizes,
            max_new_tokens=args.max_new_tokens, seed=args.seed, journal=measured,
        ):  # fmt: skip
            samples.append(sample)
    except KeyboardInterrupt:
        stopped = True
    if not samples:
        raise KeyboardInterrupt("Stopped before anything was measured.")
    rows = summarize(samples)
    summary = {"environment": conditions, "arguments": asdict(args), "rows": list(map(asdict, rows))}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(markdown(rows), encoding="utf-8")
    if stopped:
        raise KeyboardInterrupt(f"Stopped. What was measured is in {folder}, and the same command continues.")
    return rows


def _load_draft_model(args: BenchmarkArguments, target: PreTrainedModel) -> PreTrainedModel | None:
    if args.draft_model is None:
        return None
    dtype = str(target.dtype).removeprefix("torch.")
    small = replace(args, target=args.draft_model, dtype=dtype, chat_template=None, chat_template_kwargs=None)
    return load_target(small)[0]


def _conditions(target: PreTrainedModel, drafter: GumihoModel) -> dict[str, Any]:
    """Returns what a run must share with a run that it continues, besides its options."""
    return {
        "machine": machine_name(input_device(target)),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "target": model_fingerprint(target),
        "settings of the target": target.generation_config.to_diff_dict(),
        "assistant": model_fingerprint(drafter),
        "settings of the assistant": drafter.generation_config.to_diff_dict(),
    }


def machine_name(device: torch.device) -> str:
    """Returns the name of a device, of a CPU with its number of threads."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)", path.read_text(encoding="utf-8"), re.M) if path.is_file() else None
    processor = found[1] if found else platform.processor() or platform.machine()
    return f"{processor}, {torch.get_num_threads()} threads"
