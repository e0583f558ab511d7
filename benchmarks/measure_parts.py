"""Times the parts of a drafter within cycles, beside a step of its target, in each precision.

    python benchmarks/measure_parts.py

For a precision and a depth, a row has the milliseconds in a cycle of each part of the drafter, of the output head over
its features, and of all else that drafting does, and what all of it is of a step of plain decoding. The parts are
timed where they run: what the target reads between two drafts leaves nothing of the drafter in the processor's caches.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from demo_pair import DEMO_PAIR, parse
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.decoding.observers import GenerationObserver, Stage, observing
from transformers_gumiho.drafting.drafter import GumihoDrafter
from transformers_gumiho.measuring.prompts import encode_turn, pad_left, read_questions
from transformers_gumiho.measuring.timing import synchronize, temporary_settings, time_plain
from transformers_gumiho.model.decoding_settings import NEVER_PAUSES
from transformers_gumiho.pairs import PairArguments, load_pair, prompts_field


# What runs each part.
PARTS = {
    "_fuse": "fc",
    "_run_serial_head": "serial head",
    "_run_heads": "parallel heads",
    "score": "output head",
}
COLUMNS = tuple(dict.fromkeys(PARTS.values()))


@dataclass
class PartsArguments(PairArguments):
    prompts: str = prompts_field(default=str(DEMO_PAIR / "prompts.jsonl"))
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16", "float32"])
    num_assistant_tokens: int = 16
    tree_depths: list[int] = field(
        default_factory=lambda: [2, 7], metadata={"help": "Deepest drafts; a row for each."}
    )
    num_prompts: int = 4
    max_new_tokens: int = 64


class PartTimer(GenerationObserver):
    """
    Takes note of the seconds of each part in the drafts between cycles.

    Attributes:
        drafts: For each draft but that after the prompt, the seconds of its parts and of all of it, `"draft"`.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._begin = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._has_verified = False
        self.drafts: list[dict[str, float]] = []

    def on_stage_begin(self, stage: Stage) -> None:
        self._has_verified |= stage == "verify"
        if stage == "draft":
            self._seconds.clear()
            self._begin = self.now()

    def on_stage_end(self, stage: Stage) -> None:
        if stage == "draft" and self._has_verified:
            self.drafts.append({**self._seconds, "draft": self.now() - self._begin})

    def now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def timed(self, part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what runs a part and adds up its seconds."""

        def run_timed(*args: Any, **kwargs: Any) -> Any:
            begin = self.now()
            result = run(*args, **kwargs)
            self._seconds[part] += self.now() - begin
            return result

        return run_timed


@contextmanager
def timing_parts(device: torch.device) -> Iterator[PartTimer]:
    """Times the parts of all drafters within it."""
    timer, methods = PartTimer(device), {name: getattr(GumihoDrafter, name) for name in PARTS}
    for name, method in methods.items():
        setattr(GumihoDrafter, name, timer.timed(PARTS[name], method))
    try:
        with observing(timer):
            yield timer
    finally:
        for name, method in methods.items():
            setattr(GumihoDrafter, name, method)


@torch.inference_mode()
def measure(
    target: PreTrainedModel, drafter: GumihoModel, prompts: list[list[int]], settings: dict[str, Any], num_new: int
) -> dict[str, float]:
    """Returns medians in milliseconds: of each part and all of a cycle's drafting, and of a step of plain decoding."""
    drafts: list[dict[str, float]] = []
    steps: list[float] = []
    for turn, prompt in enumerate([prompts[0], *prompts]):
        inputs = pad_left([prompt], None, target.device)
        with temporary_settings(drafter, settings), timing_parts(target.device) as timer:
            target.generate(**inputs, assistant_model=drafter, max_new_tokens=num_new, do_sample=False)
        plain = time_plain(target, inputs, max_new_tokens=num_new, do_sample=False)
        if turn:  # the first one warms up
            drafts += timer.drafts
            steps.append(plain.pass_seconds)
    medians = {name: statistics.median(draft.get(name, 0.0) for draft in drafts) for name in (*COLUMNS, "draft")}
    return {name: 1e3 * seconds for name, seconds in (medians | {"step": statistics.median(steps)}).items()}


def main() -> None:
    args = parse(PartsArguments, __doc__)
    questions = read_questions(args.prompts, num_questions=args.num_prompts)
    print(f"milliseconds in a cycle of {args.num_assistant_tokens} drafted tokens\n")
    print(f"| precision | depth | {' | '.join(COLUMNS)} | growing the tree | drafting | step | share of it |")
    print("|---" * (len(COLUMNS) + 6) + "|")
    for dtype in args.dtypes:
        named = args if args.target is not None else replace(args, pair=args.pair or "demo")
        target, tokenizer, drafter = load_pair(replace(named, dtype=dtype))
        prompts = [encode_turn(tokenizer, question.turns[:1], []) for question in questions]
        for depth in args.tree_depths:
            settings = {
                "num_assistant_tokens": args.num_assistant_tokens, "tree_depth": depth, "break_even": NEVER_PAUSES,
                "prompt_lookup_num_tokens": 0,
            }  # fmt: skip
            ms = measure(target, drafter, prompts, settings, args.max_new_tokens)
            rest = ms["draft"] - sum(ms[name] for name in COLUMNS)
            cells = [f"{ms[name]:.2f}" for name in COLUMNS]
            cells += [f"{rest:.2f}", f"{ms['draft']:.2f}", f"{ms['step']:.1f}", f"{ms['draft'] / ms['step']:.0%}"]
            print(f"| {dtype} | {depth} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
