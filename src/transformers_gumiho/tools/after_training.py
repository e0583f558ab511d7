"""The last two stages of a training: tuning, and a comparison with plain decoding."""

from pathlib import Path
from typing import Any

from ..training.recipe.arguments import RecipeArguments
from .benchmarking import decoding_modes, read_prompts, run_benchmark, summarize
from .benchmarking.modes import PROMPT_LOOKUP
from .benchmarking.summary import markdown
from .pairs import PairArguments, load_pair
from .tuning import TuningArguments, describe, tune


_EVALUATION = "\n## Decoding speed\n"


def tune_drafter(args: RecipeArguments, folder: Path, prompts: Path, num_prompts: int) -> str:
    """Finds the fastest settings of the drafter in a folder, and returns them in words."""
    options = TuningArguments(
        **_pair(args, folder), prompts=str(prompts), batch_sizes=[1], num_prompts=num_prompts,
        max_new_tokens=args.measured_new_tokens,
    )  # fmt: skip
    return describe(tune(options))


def evaluate_drafter(args: RecipeArguments, folder: Path, prompts: Path, num_prompts: int) -> str:
    """Compares the drafter with plain decoding, adds the table to its card, and returns it."""
    target, tokenizer, drafter = load_pair(PairArguments(**_pair(args, folder)))
    modes = decoding_modes(drafter, names=[PROMPT_LOOKUP, "gumiho"])
    questions = read_prompts(str(prompts), num_prompts=num_prompts)
    try:
        samples = list(run_benchmark(target, tokenizer, questions, modes, max_new_tokens=args.measured_new_tokens))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Stopped. Run the same command again: this comparison begins anew.") from None
    table = markdown(summarize(samples))
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8").split(_EVALUATION)[0] if card.exists() else ""
    measured = f"{_EVALUATION}\nHeld-out prompts, on the machine that trained the drafter:\n\n{table}"
    card.write_text(f"{text.rstrip()}\n{measured}", encoding="utf-8")
    return table


def _pair(args: RecipeArguments, folder: Path) -> dict[str, Any]:
    same = {name: getattr(args, name) for name in ("target", "device_map", "chat_template", "chat_template_kwargs")}
    return same | {"assistant": str(folder), "dtype": args.target_dtype}


# What `gumiho train` does once the drafter is trained, by the name of the stage.
MEASURES = {"tune": tune_drafter, "evaluate": evaluate_drafter}
