"""Measures how often low precision or quantization decides a near tie between two tokens differently.

    python benchmarks/measure_near_ties.py
    python benchmarks/measure_near_ties.py --dtypes float32 --quantizations Int8WeightOnlyConfig load_in_4bit

A target sums in one order over one token, in another one over a draft tree, and in a third one over a full text. In
float32 the results hardly differ; in bfloat16 and float16 the two best tokens may swap places where their logits
nearly tie. Prompts are decoded plainly and with the drafter. A teacher-forced pass over each text shows, in the same
precision, at how many of its tokens another one would have been chosen, and in float32, with the same weights, how
close the two tokens are at which the texts diverge.
"""

import itertools
from dataclasses import dataclass, field

import torch
from demo_pair import DemoPairArguments, parse
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from transformers_gumiho import GumihoModel


@dataclass
class NearTieArguments(DemoPairArguments):
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16", "float16"])
    quantizations: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Measure the target quantized instead: names of torchao's configs, and `load_in_8bit` or "
            "`load_in_4bit` for bitsandbytes'."
        },
    )
    num_prompts: int = 24
    max_new_tokens: int = 64


@dataclass
class NearTies:
    """
    What was found in one precision.

    Attributes:
        plain_flips: For each token of the plain texts, whether a teacher-forced pass would have chosen another one.
        drafted_flips: The same of the texts decoded with the drafter.
        gaps: For each text that differs, by how much the logits of the two tokens at its first difference differ in a
            teacher-forced pass in float32 (of a quantized target: in its own precision).
        margins: For each plain token, by how much the best logit exceeds the second best one there.
    """

    plain_flips: list[bool] = field(default_factory=list)
    drafted_flips: list[bool] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def load_targets(
    args: NearTieArguments, dtype: torch.dtype, quantization: str | None
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns the target, and one with the same weights in float32; if it is quantized, the target itself."""
    path = args.demo_pair / "target"
    if quantization is None:
        # The second one's weights are rounded as the first one's are.
        target, exact = (AutoModelForCausalLM.from_pretrained(path, dtype=dtype) for _ in range(2))
        return target, exact.float()
    if quantization.startswith("load_in"):
        config = BitsAndBytesConfig(**{quantization: True})
    else:
        from torchao import quantization as torchao_configs

        config = TorchAoConfig(getattr(torchao_configs, quantization)())
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config)
    return target, target


@torch.no_grad()
def forced_logits(target: PreTrainedModel, text: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Returns `(new tokens, V)`: the logits from which one pass over the full text would choose each new token."""
    return target(text).logits[0, prompt_length - 1 : -1].float()


def find_near_ties(
    target: PreTrainedModel, exact_target: PreTrainedModel, gumiho: GumihoModel, args: NearTieArguments
) -> NearTies:
    """Decodes the prompts in both ways; `exact_target` measures how close two tokens are."""
    found, settings = NearTies(), {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    tokenizer = AutoTokenizer.from_pretrained(args.demo_pair / "target")
    for text in args.texts[: args.num_prompts]:
        prompt = tokenizer(text, return_tensors="pt").input_ids
        length = prompt.shape[1]
        plain = target.generate(prompt, **settings)
        drafted = target.generate(prompt, **settings, assistant_model=gumiho)
        exact = forced_logits(exact_target, plain, length)
        best = exact.topk(2).values
        found.margins += (best[:, 0] - best[:, 1]).tolist()
        for ids, flips in ((plain, found.plain_flips), (drafted, found.drafted_flips)):
            flips += (forced_logits(target, ids, length).argmax(dim=1) != ids[0, length:]).tolist()
        if not torch.equal(plain, drafted):
            ours, theirs = drafted[0, length:], plain[0, length:]
            common = min(len(ours), len(theirs))
            first = int((ours[:common] != theirs[:common]).int().argmax())
            found.gaps.append(float((exact[first, ours[first]] - exact[first, theirs[first]]).abs()))
    return found


def main() -> None:
    args = parse(NearTieArguments, __doc__)
    print(
        "| precision | texts that differ | plain tokens a forced pass would not choose | the same with Gumiho | "
        "gap where texts diverge, median (largest) | median gap everywhere |\n" + "|---" * 6 + "|"
    )
    for name, quantization in itertools.product(args.dtypes, args.quantizations or [None]):
        dtype = getattr(torch, name)
        target, exact_target = load_targets(args, dtype, quantization)
        gumiho = GumihoModel.from_pretrained(args.demo_pair / "gumiho", dtype=dtype)
        found = find_near_ties(target, exact_target, gumiho, args)
        gaps = torch.tensor(found.gaps)
        parting = f"{gaps.median():.4f} ({gaps.max():.4f})" if len(gaps) else ""
        flips = [f"{sum(texts)} of {len(texts)}" for texts in (found.plain_flips, found.drafted_flips)]
        print(
            f"| {name if quantization is None else f'{name}, {quantization}'} | {len(gaps)} of {args.num_prompts} | "
            f"{flips[0]} | {flips[1]} | "
            f"{parting} | {torch.tensor(found.margins).median():.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
