"""`gumiho tune`: finds the tree that decodes fastest on this machine, and keeps it with the drafter."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..benchmarking.loading import load_pair
from ..benchmarking.modes import decoding_settings
from ..benchmarking.prompts import encode_turn, read_questions
from ..benchmarking.stages import stage_timer
from ..modeling_gumiho import GumihoModel
from .acceptance import profile_acceptance
from .costs import CycleCosts, measure_costs
from .search import Candidate, TreeSettings, rank_trees


# Sizes at which cycles are timed; what is between them is interpolated.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BRANCHING_FACTORS = (1, 2, 4, 8, 14)
# Below 1, scores rank nodes more sharply than the drafter's probabilities.
GREEDY_DRAFT_TEMPERATURES = (0.4, 0.5, 2 / 3, 0.8, 1.0)


@dataclass
class TuningArguments:
    """The options of `gumiho tune`; [`tune`] takes them, too."""

    target: str = field(metadata={"help": "The target: a folder or a name on the Hub."})
    assistant: str = field(metadata={"help": "The Gumiho drafter: a folder or a name on the Hub."})
    prompts: str | None = field(
        default=None,
        metadata={"help": "A JSONL file with `turns`, `prompt` or `text`, or a dataset (default: the target's own)."},
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Receives `generation_config.json` (default: the drafter's folder)."}
    )
    num_prompts: int = field(default=16, metadata={"help": "Prompts to measure acceptance on."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens to generate for each of them."})
    max_tree_size: int = field(default=256, metadata={"help": "Drafted tokens of the largest tree to consider."})
    temperature: float = field(default=0.0, metadata={"help": "The temperature to tune for; 0 is greedy."})
    repeats: int = field(default=3, metadata={"help": "Times that each shape of a cycle is timed."})
    dtype: str = field(default="auto", metadata={"help": "Precision of both models."})
    device_map: str | None = field(default=None, metadata={"help": "Where the target goes (default: one device)."})


@dataclass(frozen=True)
class TuningResult:
    """
    Attributes:
        best: The fastest tree, and what is expected of it.
        default: What is expected of the settings that the drafter had.
        measured: Tokens per second of `best`, `default` and plain decoding, measured on the prompts in turns.
        by_size: The fastest tree of each size.
        costs: What cycles cost.
    """

    best: Candidate
    default: Candidate
    measured: dict[str, float]
    by_size: list[Candidate]
    costs: CycleCosts

    @property
    def speculation_pays(self) -> bool:
        """Whether decoding with the drafter was measured to be faster than without."""
        return self.measured["best"] > self.measured["plain"]


def tune(args: TuningArguments) -> TuningResult:
    """
    Measures what cycles cost here and how far trees are accepted, writes the settings that decode fastest into
    `generation_config.json`, and checks the prediction against a measurement.
    """
    target, tokenizer, drafter = load_pair(args.target, args.assistant, args.dtype, args.device_map)
    prompts = _read_prompts(args, target, tokenizer)
    result = find_best_tree(target, drafter, prompts, args)
    drafter.generation_config.update(**result.best.settings.as_dict())
    folder = Path(args.output_dir or args.assistant)
    if not folder.is_dir() and args.output_dir is None:
        raise SystemExit("The drafter is not a folder; give --output_dir for its new generation_config.json.")
    drafter.generation_config.save_pretrained(folder)
    return result


@torch.inference_mode()
def find_best_tree(
    target: PreTrainedModel, drafter: GumihoModel, prompts: Sequence[torch.Tensor], args: TuningArguments
) -> TuningResult:
    """Returns the tree that decodes `prompts` fastest; the drafter's settings stay as they are."""
    config = drafter.config
    sampling: dict[str, Any] = {}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0}
    now = drafter.generation_config
    default = TreeSettings(
        now.num_assistant_tokens,
        now.branching_factor,
        now.tree_depth,
        now.draft_temperature or args.temperature or 2 / 3,
    )
    sizes = [size for size in SIZES if size <= args.max_tree_size]
    factors = sorted({*BRANCHING_FACTORS, default.branching_factor})
    temperatures = sorted(
        {*((args.temperature,) if sampling else GREEDY_DRAFT_TEMPERATURES), default.draft_temperature}
    )
    costs = measure_costs(target, drafter, prompts[0], sizes, factors, min(args.max_new_tokens, 32), args.repeats)
    shapes = [(factor, temperature) for factor in factors for temperature in temperatures]
    profiles = {}
    for factor, temperature in tqdm(shapes, desc="measuring acceptance", unit="shape"):
        settings = TreeSettings(max(sizes), factor, config.max_draft_depth, temperature).as_dict()
        profiles[factor, temperature] = profile_acceptance(
            target, drafter, prompts, args.max_new_tokens, settings, **sampling
        )
    ranked = rank_trees(profiles, costs, range(1, max(sizes) + 1), config.num_serial_tokens, config.max_draft_depth)
    profile = profiles[default.branching_factor, default.draft_temperature]
    expected_default = Candidate(
        default,
        profile.tau(default.num_assistant_tokens, default.tree_depth),
        costs.cycle_seconds(default.num_assistant_tokens, default.branching_factor, default.tree_depth),
    )
    by_size: dict[int, Candidate] = {}
    for candidate in ranked:
        by_size.setdefault(candidate.settings.num_assistant_tokens, candidate)
    return TuningResult(
        best=ranked[0],
        default=expected_default,
        measured=_measure(target, drafter, prompts, args, {"best": ranked[0].settings, "default": default}, sampling),
        by_size=[by_size[size] for size in sizes if size in by_size],
        costs=costs,
    )


def describe(result: TuningResult) -> str:
    """Returns what `gumiho tune` prints."""
    lines = [
        "drafted  verify ms  cycle ms    tau  tokens/s  branching  depth  draft temperature",
        *map(_row, [result.costs] * len(result.by_size), result.by_size),
        "",
        f"plain decoding: {result.measured['plain']:.1f} tokens/s measured",
    ]
    for name, candidate in (("settings before", result.default), ("best settings", result.best)):
        measured = result.measured["default" if candidate is result.default else "best"]
        difference = candidate.tokens_per_second / measured - 1
        lines.append(
            f"{name}: {candidate.tokens_per_second:.1f} tokens/s expected, {measured:.1f} measured "
            f"({difference:+.0%}), {measured / result.measured['plain']:.2f} times plain"
        )
    gain = result.measured["best"] / result.measured["default"] - 1
    lines.append(f"the best settings are {gain:+.0%} against those before: {result.best.settings}")
    if not result.speculation_pays:
        lines.append("PLAIN DECODING IS FASTER on this machine: leave `assistant_model` out.")
    return "\n".join(lines)


def _row(costs: CycleCosts, candidate: Candidate) -> str:
    tree = candidate.settings
    return (
        f"{tree.num_assistant_tokens:7d}  {1e3 * costs.verify_seconds(tree.num_assistant_tokens):9.2f}  "
        f"{1e3 * candidate.cycle_seconds:8.2f}  {candidate.tau:5.2f}  {candidate.tokens_per_second:8.1f}  "
        f"{tree.branching_factor:9d}  {tree.tree_depth:5d}  {tree.draft_temperature:.2f}"
    )


def _measure(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    args: TuningArguments,
    trees: dict[str, TreeSettings],
    sampling: dict[str, Any],
) -> dict[str, float]:
    """Returns the tokens per second of each tree and of plain decoding, prompts aside, taking turns."""
    seconds, tokens = dict.fromkeys([*trees, "plain"], 0.0), dict.fromkeys([*trees, "plain"], 0)
    for index, prompt in enumerate(tqdm(prompts, desc="checking", unit="prompt")):
        ids = prompt[None].to(target.device)
        for name in seconds:
            torch.manual_seed(index)
            with ExitStack() as stack:
                if name in trees:
                    stack.enter_context(decoding_settings(drafter, trees[name].as_dict()))
                timer = stack.enter_context(stage_timer(target.device))
                assistant = {"assistant_model": drafter} if name in trees else {}
                settings = {"do_sample": False, "max_new_tokens": args.max_new_tokens} | sampling
                output = target.generate(ids, **settings, **assistant)
            prompt_seconds = timer.prompt
            if name == "plain":
                with stage_timer(target.device) as timer_of_prompt:
                    target.generate(ids, **settings | {"max_new_tokens": 1})
                prompt_seconds = timer_of_prompt.total
            seconds[name] += timer.total - prompt_seconds
            # The first token comes from the prompt.
            tokens[name] += output.shape[1] - ids.shape[1] - 1
    return {name: tokens[name] / seconds[name] for name in seconds}


def _read_prompts(
    args: TuningArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[torch.Tensor]:
    if args.prompts is not None:
        questions = read_questions(args.prompts, num_questions=args.num_prompts)
        return [torch.tensor(encode_turn(tokenizer, question.turns[:1], [])) for question in questions]
    start = target.generation_config.bos_token_id
    if start is None:
        raise SystemExit("The target has no token to begin a text with; give --prompts.")
    torch.manual_seed(0)
    texts = target.generate(
        torch.full((args.num_prompts, 1), start, device=target.device), do_sample=True, max_new_tokens=32,
        min_new_tokens=32,
    )  # fmt: skip
    return list(texts.cpu())
