"""What a run will take: disk, memory and hours, estimated before it starts."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..model.configuration_gumiho import GumihoConfig
from ..model.modeling_gumiho import GumihoModel
from ..model.target_shape import state_width
from ..training.feature_cache import kept_layers
from ..user_errors import UserOSError
from .arguments import RecipeArguments


# Of the limit: how long answers are on average. Half of SmolLM2's end before 200 of 224 tokens.
_ANSWER_SHARE = 0.5
_PROMPT_TOKENS = 64
_TIMED_STEPS, _TIMED_LENGTH = 8, 128
# A training step is a forward and a backward pass, which costs two forward passes.
_PASSES_PER_STEP = 3
_TUNED_TREES, _EVALUATED_MODES = 16, 3
_MOMENTS = 12  # bytes of a trained parameter's gradient and Adam's two moments, in float32


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a target, measured for a moment: writing a batch, reading texts, writing one row."""

    writing: float
    reading: float
    decoding: float


@dataclass(frozen=True)
class Cost:
    """What a stage takes: bytes of disk, bytes of memory, seconds."""

    disk: float = 0
    memory: float = 0
    seconds: float = 0


@torch.inference_mode()
def measure_speed(target: PreTrainedModel, batch_size: int) -> Speed:
    """Times a few steps of the target: with prompts of one token for writing, and one text for reading."""
    ids = torch.ones(1, _TIMED_LENGTH, dtype=torch.long, device=target.device)

    def seconds(rows: int) -> float:
        settings = {"max_new_tokens": _TIMED_STEPS, "min_new_tokens": _TIMED_STEPS, "do_sample": False}
        batch = ids[:, :_PROMPT_TOKENS].expand(rows, -1)
        begin = time.perf_counter()
        target.generate(batch, attention_mask=torch.ones_like(batch), **settings)
        return time.perf_counter() - begin

    seconds(1)  # warms up
    one, many = seconds(1), seconds(batch_size)
    begin = time.perf_counter()
    target(ids).logits[0, -1, 0].item()  # waits for the device
    return Speed(batch_size * _TIMED_STEPS / many, _TIMED_LENGTH / (time.perf_counter() - begin), _TIMED_STEPS / one)


def estimate(
    args: RecipeArguments,
    target: PreTrainedModel,
    config: GumihoConfig,
    num_rows: int,
    num_epochs: Sequence[float],
    speed: Speed,
) -> dict[str, Cost]:
    """
    Returns what each stage takes, for a drafter of this `config`, `num_rows` rows of data, and trainings of these
    numbers of epochs.
    """
    num_tokens = num_rows * (_PROMPT_TOKENS + _ANSWER_SHARE * args.max_new_tokens)
    with torch.device("meta"):
        drafter = GumihoModel(config)
    size = sum(parameter.numel() for parameter in drafter.parameters())
    trained = sum(p.numel() for name, p in drafter.named_parameters() if not name.startswith("embed_tokens"))
    model_bytes = target.get_memory_footprint()
    width = state_width(target.config.get_text_config(decoder=True))
    layers = 1 + len(kept_layers(config.target_layer_ids, target.config))
    token_bytes = width * getattr(torch, args.features_dtype).itemsize * layers + 12
    share = trained / max(sum(p.numel() for p in target.parameters()), 1)
    passes = _PASSES_PER_STEP * share + (0 if args.cache_features else 1)
    measured = args.num_measured_prompts * args.measured_new_tokens / speed.decoding
    costs = {
        "write": Cost(6 * num_tokens, 1.2 * model_bytes, num_tokens / speed.writing),
        "features": Cost(token_bytes * num_tokens, 1.1 * model_bytes, num_tokens / speed.reading),
        "train": Cost(
            len(num_epochs) * 3 * (4 * size + _MOMENTS * trained),
            4 * size + _MOMENTS * trained + (0 if args.cache_features else model_bytes),
            sum(num_epochs) * num_tokens * passes / speed.reading,
        ),
        "tune": Cost(0, 1.2 * model_bytes + 2 * size, _TUNED_TREES * measured),
        "evaluate": Cost(0, 1.2 * model_bytes + 2 * size, _EVALUATED_MODES * measured),
    }
    if not args.regenerate:
        del costs["write"]
    if not args.cache_features:
        del costs["features"]
    return {stage: cost for stage, cost in costs.items() if stage in args.stages}


def describe(costs: dict[str, Cost], folder: Path) -> str:
    """Returns the plan as a table. Raises `OSError` if the disk has no room for it."""
    lines = ["stage        disk      memory   time (estimates: the target was timed for a moment)"]
    for stage, cost in costs.items():
        lines.append(f"{stage:<10} {_size(cost.disk):>8}  {_size(cost.memory):>8}   {_time(cost.seconds)}")
    disk, seconds = (sum(getattr(cost, name) for cost in costs.values()) for name in ("disk", "seconds"))
    memory = max((cost.memory for cost in costs.values()), default=0)
    lines.append(f"{'all':<10} {_size(disk):>8}  {_size(memory):>8}   {_time(seconds)}")
    free = shutil.disk_usage(folder).free
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if disk - written > free:
        raise UserOSError(
            f"The run needs about {_size(disk - written)} more in {str(folder)!r}, and {_size(free)} are free. Use a "
            f"larger disk, fewer rows, or `--cache_features false`."
        )
    return "\n".join(lines)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
