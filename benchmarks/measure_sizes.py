"""Measures trees whose sizes fit each cycle against fixed ones, and a drafter that does not fit at all.

    python benchmarks/measure_sizes.py

All ways of decoding take turns, prompt by prompt: plain decoding, trees of fixed sizes, sizes that fit
(`cycle_costs`), and the same with a drafter of random weights, whose drafts are worth nothing. What cycles cost is
measured first, on prompts that the comparison does not use, or read from `--cost_table`. The column "by the table"
compares what the cycles should have taken by it: that tells how sizes are chosen, however busy the machine is. With
`--clock processor` seconds are those of the processor, which tell more on a machine that does other things, too.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers import HfArgumentParser, PreTrainedModel, logging

from transformers_gumiho import GumihoModel
from transformers_gumiho.decoding.observers import GenerationObserver, observing
from transformers_gumiho.drafting.tree_size import SizeChoice, SizeReason
from transformers_gumiho.measuring.decoding_settings import decoding_settings
from transformers_gumiho.measuring.loading import load_pair
from transformers_gumiho.measuring.prompts import encode_turn, padded_batches, read_questions
from transformers_gumiho.measuring.stages import synchronize
from transformers_gumiho.model.cycle_costs import BatchCosts, CycleCostTable
from transformers_gumiho.tuning import TuningArguments, fit_sizes


DEMO_PAIR = Path(__file__).parent.parent / "examples" / "demo_pair"
PLAIN, FIT, RANDOM = "plain", "sizes that fit", "sizes that fit, random drafter"


@dataclass
class SizesArguments:
    target: str = field(default=str(DEMO_PAIR / "target"), metadata={"help": "The target."})
    assistant: str = field(default=str(DEMO_PAIR / "gumiho"), metadata={"help": "The Gumiho drafter."})
    prompts: str = field(default=str(DEMO_PAIR / "prompts.jsonl"), metadata={"help": "Prompts, one a line."})
    dtype: str = "float32"
    fixed_sizes: list[int] = field(default_factory=lambda: [4, 8, 12, 16, 24], metadata={"help": "Of fixed trees."})
    max_size: int = field(default=24, metadata={"help": "Drafted tokens of the largest tree where sizes fit."})
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 8])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0], metadata={"help": "0 is greedy."})
    num_prompts: int = field(default=24, metadata={"help": "Prompts of the comparison."})
    num_tuning_prompts: int = field(default=8, metadata={"help": "Prompts before them, to measure costs on."})
    max_new_tokens: int = 128
    prompt_lookup_num_tokens: int | None = field(
        default=None,
        metadata={"help": "Also draft so many tokens from the context; 0 for none (default: the drafter's setting)."},
    )
    clock: Literal["wall", "processor"] = "wall"
    threads: int | None = field(default=None, metadata={"help": "Threads of PyTorch (default: its own choice)."})
    cost_table: str | None = field(
        default=None,
        metadata={"help": "A JSON file to take what cycles cost from, or to keep it in if there is none."},
    )


@dataclass
class Way:
    """A way of decoding: with which drafter, if any, and under which settings of it."""

    name: str
    drafter: GumihoModel | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """
    What a way of decoding did: seconds of each batch, its cycles by size, those in which the drafter rested,
    lengths, texts equal to plain; milliseconds of the cycles that drafted, where they were told.
    """

    seconds: list[float] = field(default_factory=list)
    sizes: Counter[int] = field(default_factory=Counter)
    sizes_at_rest: Counter[int] = field(default_factory=Counter)
    drafted_ms: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_equal: int = 0

    def add(self, seconds: float, output: Any, cycles: "CyclesSeen", is_equal: bool) -> None:
        self.seconds.append(seconds)
        self.sizes.update(getattr(output, "tree_sizes", None) or [])
        self.sizes_at_rest.update(cycles.sizes_at_rest)
        self.drafted_ms += cycles.drafted_ms
        self.lengths += [length for row in getattr(output, "accepted_lengths", None) or [] for length in row]
        self.num_equal += is_equal

    def expected_ms(self, costs: BatchCosts) -> float:
        """Returns what the cycles should have taken, by their sizes and whether the drafter rested."""
        drafted = self.sizes - self.sizes_at_rest
        drafted_ms = sum(self.drafted_ms) or sum(n * float(costs.cycle_ms(size)) for size, n in drafted.items())
        return drafted_ms + sum(n * float(costs.undrafted_ms(size)) for size, n in self.sizes_at_rest.items())


class CyclesSeen(GenerationObserver):
    """
    Keeps the sizes of the trees of cycles in which the drafter rested, runs of the context's drafts included, and the
    milliseconds that others should take.
    """

    def __init__(self) -> None:
        self.sizes_at_rest: list[int] = []
        self.drafted_ms: list[float] = []

    def on_tree_sized(self, reason: SizeReason) -> None:
        if isinstance(reason, SizeChoice):
            self.drafted_ms.append(reason.cycle_ms[reason.place])
        else:
            self.sizes_at_rest.append(reason.size)


def random_drafter(drafter: GumihoModel, target: PreTrainedModel) -> GumihoModel:
    """Returns a drafter like `drafter`, with random weights but for the embedding, which is the target's."""
    torch.manual_seed(0)
    random = GumihoModel(drafter.config).to(device=target.device, dtype=target.dtype).eval()
    for parameter in random.mlp.parameters():  # which begin as zeros
        torch.nn.init.normal_(parameter, std=0.05)
    random.share_embedding(target)
    random.generation_config.update(**drafter.generation_config.to_dict())
    return random


def costs_of(
    target: PreTrainedModel, drafter: GumihoModel, prompts: list[torch.Tensor], args: SizesArguments
) -> dict[str, Any]:
    """Returns the table that `gumiho tune` would write for the drafter's own tree."""
    path = Path(args.cost_table) if args.cost_table else None
    if path is not None and path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    own = drafter.generation_config
    names = ("branching_factor", "tree_depth", "draft_temperature", "draft_vocabulary")
    settings = {name: getattr(own, name) for name in names} | {"num_assistant_tokens": args.max_size}
    options = TuningArguments("", "", max_new_tokens=args.max_new_tokens, max_tree_size=args.max_size)
    with decoding_settings(drafter, {"prompt_lookup_num_tokens": None}):
        fitted = fit_sizes(target, drafter, prompts, settings, options)
    table = fitted.table.as_dict()
    if path is not None:
        path.write_text(json.dumps(table), encoding="utf-8")
    return table


def ways_of(drafter: GumihoModel, random: GumihoModel, costs: dict[str, Any], args: SizesArguments) -> list[Way]:
    fit = {"num_assistant_tokens": args.max_size, "cycle_costs": costs}
    fixed = [
        Way(f"tree of {size}", drafter, {"num_assistant_tokens": size, "cycle_costs": None})
        for size in args.fixed_sizes
    ]
    return [Way(PLAIN), *fixed, Way(FIT, drafter, fit), Way(RANDOM, random, fit)]


@contextmanager
def settings_of(way: Way) -> Iterator[dict[str, Any]]:
    """Yields what `generate()` is given for this way of decoding."""
    if way.drafter is None:
        yield {}
        return
    with decoding_settings(way.drafter, way.settings):
        yield {"assistant_model": way.drafter}


@torch.inference_mode()
def decode(
    target: PreTrainedModel, way: Way, batch: dict[str, torch.Tensor], **kwargs: Any
) -> tuple[float, Any, CyclesSeen]:
    """Returns the seconds that a batch took, what `generate()` returned, and what its cycles were."""
    with settings_of(way) as arguments, observing(cycles := CyclesSeen()):
        synchronize(target.device)
        begin = time.perf_counter()
        output = target.generate(**batch, **arguments, **kwargs, return_dict_in_generate=True)
        synchronize(target.device)
        seconds = time.perf_counter() - begin
    if way.settings and way.settings["cycle_costs"] is None:
        # Nobody tells of trees of fixed size; what is more is a run.
        cycles.sizes_at_rest = [size for size in output.tree_sizes if size > way.settings["num_assistant_tokens"]]
    return seconds, output, cycles


def compare(
    target: PreTrainedModel, ways: list[Way], inputs: list[dict[str, torch.Tensor]], temperature: float, num_new: int
) -> dict[str, Record]:
    """Decodes all batches in all ways in turns."""
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    records = {way.name: Record() for way in ways}
    for turn, batch in enumerate(tqdm([inputs[0], *inputs], leave=False)):
        outputs = {}
        shift = turn % len(ways)
        for way in [*ways[shift:], *ways[:shift]]:
            torch.manual_seed(turn)
            outputs[way.name] = decode(target, way, batch, max_new_tokens=num_new, **sampling)
        if turn:  # the first one warms up
            plain = outputs[PLAIN][1].sequences
            for name, (seconds, output, cycles) in outputs.items():
                records[name].add(seconds, output, cycles, torch.equal(output.sequences, plain))
    return records


def report(records: dict[str, Record], costs: BatchCosts, categories: list[str]) -> None:
    """Prints a row for each way of decoding, and how sizes that fit did in each category of the batches."""
    fixed = [name for name in records if name.startswith("tree of")]
    best = min(fixed, key=lambda name: sum(records[name].seconds))
    best_by_table = min(records[name].expected_ms(costs) for name in fixed)
    columns = ("way", "speed-up (median)", "lowest", f"total against {best}", "by the table", "tau", "equal")
    print(f"| {' | '.join((*columns, 'cycles by size', 'of a resting drafter'))} |\n" + "|---" * 9 + "|")
    for name, record in records.items():
        ratios = [plain / own for plain, own in zip(records[PLAIN].seconds, record.seconds, strict=True)]
        by_table = f"{best_by_table / record.expected_ms(costs) - 1:+.1%}" if record.sizes else ""
        cells = [
            name, f"{statistics.median(ratios):.3f}", f"{min(ratios):.2f}",
            f"{sum(records[best].seconds) / sum(record.seconds) - 1:+.1%}", by_table,
            f"{statistics.mean(record.lengths):.2f}" if record.lengths else "",
            f"{record.num_equal} of {len(ratios)}",
            ", ".join(f"{size}: {count}" for size, count in sorted((record.sizes - record.sizes_at_rest).items())),
            ", ".join(f"{size}: {count}" for size, count in sorted(record.sizes_at_rest.items())),
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
    if len(set(categories)) > 1:
        gains = ", ".join(f"{name} {gain:+.1%}" for name, gain in gains_by_category(records, best, categories).items())
        print(f"\n{FIT} against {best}, by category: {gains}", flush=True)


def gains_by_category(records: dict[str, Record], best: str, categories: list[str]) -> dict[str, float]:
    """Returns what sizes that fit took less time than the way `best`, in the batches of each category."""

    def seconds(way: str, category: str) -> float:
        taken = zip(categories, records[way].seconds, strict=True)
        return sum(of_batch for name, of_batch in taken if name == category)

    return {name: seconds(best, name) / seconds(FIT, name) - 1 for name in dict.fromkeys(categories)}


def main() -> None:
    (args,) = HfArgumentParser(SizesArguments, description=__doc__).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    if args.clock == "processor":
        time.perf_counter = time.process_time  # for what cycles cost, too
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    questions = read_questions(args.prompts, num_questions=args.num_tuning_prompts + args.num_prompts)
    target, tokenizer, drafter = load_pair(args.target, args.assistant, args.dtype)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if args.prompt_lookup_num_tokens is not None:
        drafter.generation_config.prompt_lookup_num_tokens = args.prompt_lookup_num_tokens
    texts = [encode_turn(tokenizer, question.turns[:1], []) for question in questions]
    num_measured = len(texts) - args.num_tuning_prompts
    if num_measured < max(args.batch_sizes):
        raise SystemExit(
            f"Batches of {max(args.batch_sizes)} need as many prompts, got {max(num_measured, 0)} besides those of "
            f"--num_tuning_prompts: raise --num_prompts, or give a file of more."
        )
    costs = costs_of(target, drafter, [torch.tensor(text) for text in texts[: args.num_tuning_prompts]], args)
    table = CycleCostTable.parse(costs)
    print(json.dumps(costs))
    ways = ways_of(drafter, random_drafter(drafter, target), costs, args)
    for temperature in args.temperatures:
        for size in args.batch_sizes:
            print(f"\n{'greedy' if not temperature else f'temperature {temperature:g}'}, batches of {size}\n")
            measured = texts[args.num_tuning_prompts :]
            whole = measured[: len(measured) // size * size]
            inputs = padded_batches(tokenizer, whole, size, target.device)
            records = compare(target, ways, inputs, temperature, args.max_new_tokens)
            # A batch is of one category where it has one row.
            names = [question.category for question in questions[args.num_tuning_prompts :]] if size == 1 else []
            report(records, table.for_batch(size, is_sampling=temperature > 0), names)


if __name__ == "__main__":
    main()
