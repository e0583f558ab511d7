"""Measures decoding with and without the drafter, on the demo pair or another pair that was trained as it was.

    python benchmarks/measure_pair.py

Greedy decoding of several held-out prompts: plain `generate()` and `generate(assistant_model=...)` take turns, prompt
by prompt, so that a machine that gets slower meanwhile slows both.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, logging

from transformers_gumiho import GumihoModel


@dataclass
class PairArguments:
    demo_pair: Path = field(
        default=Path(__file__).parent.parent / "examples" / "demo_pair",
        metadata={"help": "Folder with `target`, `gumiho` and prompts."},
    )
    num_prompts: int = 12
    max_new_tokens: int = 128
    repeats: int = field(default=3, metadata={"help": "Times that each prompt is decoded in each way."})
    num_assistant_tokens: int | None = field(
        default=None, metadata={"help": "Drafted tokens per cycle (default: the drafter's own setting)."}
    )
    branching_factor: int | None = field(
        default=None, metadata={"help": "Tokens kept at each serial step (default: the drafter's own setting)."}
    )
    full_tree_attention: bool = field(
        default=True, metadata={"help": "Whether nodes are chosen among all recombinations of the heads' tokens."}
    )


@dataclass
class Measurement:
    """One prompt decoded in both ways: seconds of each repeat, new tokens, and the acceptance lengths."""

    plain_seconds: list[float]
    drafted_seconds: list[float]
    num_tokens: int
    accepted_lengths: list[int]
    equal: bool
    text: str


def decode(target: torch.nn.Module, inputs: dict[str, torch.Tensor], **kwargs: object) -> tuple[float, object]:
    """Returns the seconds that greedy decoding took, and its output."""
    start = time.perf_counter()
    output = target.generate(**inputs, do_sample=False, return_dict_in_generate=True, **kwargs)
    output.sequences.cpu()  # a GPU is done when its result is here
    return time.perf_counter() - start, output


def measure(
    target: torch.nn.Module, gumiho: GumihoModel, tokenizer: object, prompt: str, args: PairArguments
) -> Measurement:
    """Decodes one prompt in both ways in turn."""
    inputs = tokenizer(prompt, return_tensors="pt").to(target.device)
    plain_seconds, drafted_seconds = [], []
    for _ in range(args.repeats):
        seconds, plain = decode(target, inputs, max_new_tokens=args.max_new_tokens)
        plain_seconds.append(seconds)
        seconds, drafted = decode(target, inputs, max_new_tokens=args.max_new_tokens, assistant_model=gumiho)
        drafted_seconds.append(seconds)
    prompt_length = inputs["input_ids"].shape[1]
    return Measurement(
        plain_seconds=plain_seconds,
        drafted_seconds=drafted_seconds,
        num_tokens=plain.sequences.shape[1] - prompt_length,
        accepted_lengths=drafted.accepted_lengths[0],
        equal=torch.equal(plain.sequences, drafted.sequences),
        text=tokenizer.decode(drafted.sequences[0, prompt_length:]),
    )


def report(measurements: list[Measurement], args: PairArguments) -> None:
    """Prints the comparison over all prompts."""
    plain_speed = [m.num_tokens / s for m in measurements for s in m.plain_seconds]
    drafted_speed = [m.num_tokens / s for m in measurements for s in m.drafted_seconds]
    speedups = [p / d for m in measurements for p, d in zip(m.plain_seconds, m.drafted_seconds, strict=True)]
    lengths = [length for m in measurements for length in m.accepted_lengths]
    num_equal = sum(m.equal for m in measurements)
    print(f"\nprompts                          {len(measurements)}, {args.repeats} times each")
    print(f"equal to plain, token for token  {num_equal} of {len(measurements)}")
    print(f"mean acceptance length tau       {statistics.mean(lengths):.2f}" if lengths else "no cycles")
    print(f"plain generate()                 {statistics.median(plain_speed):.0f} tokens/s (median)")
    print(f"with the Gumiho assistant        {statistics.median(drafted_speed):.0f} tokens/s (median)")
    print(f"speed-up                         {statistics.median(speedups):.2f} (median of {len(speedups)} pairs)")


def main() -> None:
    (args,) = HfArgumentParser(PairArguments).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The weights are bf16; float32 keeps two orders of summation from changing a near-tie.
    target = AutoModelForCausalLM.from_pretrained(args.demo_pair / "target", dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.demo_pair / "target")
    gumiho = GumihoModel.from_pretrained(args.demo_pair / "gumiho", dtype=torch.float32).to(device)
    # Its settings are those that `gumiho tune` found on two CPU cores.
    settings = gumiho.generation_config
    settings.num_assistant_tokens = args.num_assistant_tokens or settings.num_assistant_tokens
    settings.branching_factor = args.branching_factor or settings.branching_factor
    settings.full_tree_attention = args.full_tree_attention

    with (args.demo_pair / "prompts.jsonl").open(encoding="utf-8") as file:
        prompts = [json.loads(line)["text"] for line in file][: args.num_prompts]
    measure(target, gumiho, tokenizer, prompts[0], args)  # warm-up
    measurements = []
    for prompt in tqdm(prompts, desc="decoding", unit="prompt"):
        measurements.append(measure(target, gumiho, tokenizer, prompt, args))
        if len(measurements) == 1:
            color, plain = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("", "")
            tqdm.write(f"{prompt}\n{color}{measurements[0].text}{plain}\n")
    report(measurements, args)


if __name__ == "__main__":
    main()
