"""What fits on an accelerator: each stage to come runs its largest pass on random tokens before the first long one."""

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from ...commands import UserValueError
from ...generation.verification.target_states import OutputHead
from ...generation.verification.traits import input_device
from ...internals import CACHE_NAME
from ...model.modeling_gumiho import GumihoModel
from ...model.target_shape import state_width
from ..data.target_runs import ONE_ROW_EACH
from ..feature_cache import CachedFeatures
from ..feature_extraction import DEFAULT_BATCH_TOKENS
from ..target_features import OnlineFeatures
from .context import RunContext
from .phases import Training
from .target import say


_NUM_DECODED = 8  # tokens, which take a few cycles
_MEASURING = "--device_map auto, --target_dtype bfloat16, or --stages without tune and evaluate"
# What a stage may do with less memory.
WAYS_OUT = {
    "write": "a smaller --writing_batch_size or --max_new_tokens, --device_map auto, or a server (--endpoint)",
    "features": "a smaller --tokens_per_pass or --max_length, or --device_map auto",
    "train": "a smaller --tokens_per_pass, --max_length, --loss_chunk_size or --per_device_train_batch_size, or "
    "splitting the drafter (examples/accelerate/fsdp.yaml)",
    "tune": _MEASURING,
    "evaluate": _MEASURING,
}


class Trial(NamedTuple):
    """The pass that is planned of a stage or phase, in tokens or rows."""

    stage: str
    run: Callable[[int], None]  # runs a pass of this size
    size: int
    smallest: int  # that can be asked for
    unit: str = "tokens"


def try_stages(run: RunContext, stages: Collection[str]) -> None:
    """
    Tries the largest pass of each of the stages, and lowers `tokens_per_pass`, and the batches of answers, until they
    fit. Prints the peak of memory of each. All processes try the same, and what fails in one fails in all.

    Raises:
        ValueError: Not even a single row fits.
    """
    args, device = run.args, run.training_args.device
    with _equal_memory(device):
        if run.is_cached and "train" in stages:
            run.release_target()  # which is not there while the drafter trains
        for name in run.phases if "train" in stages else ():
            _limit_passes(run, _training(run, name), device)
        if args.features is not None:
            return
        if "features" in stages and run.is_cached:
            _limit_passes(run, _features(run), device)
        if "write" in stages and args.regenerate and args.endpoint is None:
            args.writing_batch_size = largest_that_fits(_writing(run), device)
        if {"tune", "evaluate"} & {*stages}:
            largest_that_fits(_decoding(run), device)
        if args.endpoint is not None:
            run.release_target()  # for the server, which may be on this device


def _limit_passes(run: RunContext, trial: Trial, device: torch.device) -> None:
    if (size := largest_that_fits(trial, device)) < trial.size:
        for phase in run.phases.values():
            phase.tokens_per_pass = size


def largest_that_fits(trial: Trial, device: torch.device) -> int:
    """
    Returns the size, halved as often as necessary, with which a trial fits in all processes. Raises `ValueError` where
    the smallest does not.
    """
    size, memory = trial.size, torch.get_device_module(device)
    torch.empty(1, device=device)  # a device counts its memory from its first tensor on
    while True:
        if hasattr(memory, "reset_peak_memory_stats"):
            memory.reset_peak_memory_stats(device)
        try:
            trial.run(size)
            fits = True
        except torch.OutOfMemoryError:
            fits = False
        # Beyond the handler: until then the error holds what the pass had computed.
        peak = memory.max_memory_allocated(device) if hasattr(memory, "max_memory_allocated") else 0
        gc.collect()
        if hasattr(memory, "empty_cache"):
            memory.empty_cache()
        if all(gather_object([fits])):
            say(f"tried {trial.stage:<10} {size:>8,} {trial.unit:<6} {peak / 1e9:>6.1f} GB at the peak")
            return size
        if size <= trial.smallest:
            raise UserValueError(
                f"The stage {trial.stage!r} does not fit on {device} with {size:,} {trial.unit}, and there can be no "
                f"fewer. What helps: {WAYS_OUT.get(trial.stage, WAYS_OUT['train'])}. `--ignore_plan` starts all the "
                f"same."
            )
        size = max(size // 2, trial.smallest)
        say(f"tried {trial.stage:<10} too much memory: next with {size:,} {trial.unit}")


def _training(run: RunContext, name: str) -> Trial:
    """A step of a phase: forward, backward and optimizer."""
    phase, length = run.phases[name], run.longest_row
    source = _RandomFeatures(run) if run.is_cached else run.target

    def step(num_tokens: int) -> None:
        num_rows = num_tokens // length
        rows = [_random_row(run, length)] * (num_rows * phase.world_size)
        data = {"train_dataset": rows, "eval_dataset": None}
        Training(run, data, lambda: source).try_step(phase, num_rows * length)

    if phase.tokens_per_step is None:
        planned = phase.train_batch_size * length
        return Trial(name, step, planned, planned)
    return Trial(name, step, max((phase.pass_budget or 0) // length, 1) * length, length)


def _features(run: RunContext) -> Trial:
    """Two batches: the target reads the next one while the host takes the states of the one before."""
    length = run.longest_row

    def read(num_tokens: int) -> None:
        features = OnlineFeatures(run.target, run.layers)
        batch = {"input_ids": _random_ids(run, num_tokens // length, length).to(input_device(run.target))}
        kept = [features.states(batch) for _ in range(2)]
        del kept

    planned = length * max((run.training_args.pass_budget or DEFAULT_BATCH_TOKENS) // length, 1)
    return Trial("features", read, planned, length)


def _writing(run: RunContext) -> Trial:
    """The prompts of a batch in one pass, and then a step with a cache that holds the longest answers."""
    args, budget = run.args, run.training_args.pass_budget or DEFAULT_BATCH_TOKENS

    def write(num_rows: int) -> None:
        num_prompt = min(max(budget // num_rows, 1), run.longest_row - 1)
        num_all = min(num_prompt + args.max_new_tokens, run.longest_row)
        ids = _random_ids(run, num_rows, num_prompt).to(input_device(run.target))
        cache = DynamicCache(config=run.target.config)
        settings: dict[str, Any] = ONE_ROW_EACH | {
            "do_sample": False, "max_new_tokens": 1, "cache_implementation": None, CACHE_NAME: cache,
        }  # fmt: skip
        run.target.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
        for layer in layers:
            kept = layer.keys, layer.values
            layer.update(*(t.new_zeros(*t.shape[:2], num_all - num_prompt, t.shape[3]) for t in kept))
        with torch.inference_mode():
            run.target(ids[:, :1], attention_mask=ids.new_ones(num_rows, num_all + 1), **{CACHE_NAME: cache})

    return Trial("write", write, args.writing_batch_size, 1, "rows")


def _decoding(run: RunContext) -> Trial:
    """Some cycles, with target and drafter in the target's precision."""

    def decode(num_tokens: int) -> None:
        drafter = GumihoModel.from_target(run.target, **run.fields)
        ids = _random_ids(run, 1, num_tokens).to(input_device(run.target))
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": _NUM_DECODED, "assistant_model": drafter}
        run.target.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    length = max(run.longest_row - _NUM_DECODED, 1)
    return Trial("tune", decode, length, length)


def _random_ids(run: RunContext, num_rows: int, length: int) -> torch.Tensor:
    vocab_size = run.target_config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocab_size, (num_rows, length), dtype=torch.int32)


class _RandomFeatures(CachedFeatures):
    """What a cache of a target's states holds of the target, by its shapes."""

    def __init__(self, run: RunContext):
        self.config, self.layers, self.made_from = run.target_config, run.layers, {}
        dtype = self.config.dtype or torch.float32
        with torch.device("meta"):
            target = AutoModelForCausalLM.from_config(self.config)
        self.embedding = torch.randn(target.get_input_embeddings().weight.shape).to(dtype)
        num_outputs, num_inputs = target.get_output_embeddings().weight.shape
        self._linear = nn.Linear(num_inputs, num_outputs, bias=False, dtype=dtype).requires_grad_(False)
        self.head = OutputHead(self._linear, self.config)


def _random_row(run: RunContext, length: int) -> dict[str, torch.Tensor]:
    """Returns a row of this length, all of whose positions count; packed, it holds two texts."""
    row = {"input_ids": _random_ids(run, 1, length)[0], "loss_mask": torch.ones(length, dtype=torch.int32)}
    if run.args.packing:
        row["position_ids"] = torch.arange(length, dtype=torch.int32) % -(-length // 2)
    if run.is_cached:
        width, dtype = state_width(run.target_config.get_text_config(decoder=True)), run.args.features_dtype
        num_further = 0 if run.layers is None else len(run.layers.besides_last_states(run.target_config))
        for name, number in (("hidden_states", 1), ("layer_states", num_further)):
            if number or run.layers is not None:
                row[name] = torch.randn(length, number * width).to(getattr(torch, dtype))
    return row


@contextmanager
def _equal_memory(device: torch.device) -> Iterator[None]:
    """
    Lets each process have the memory that the one with the least has. The same pass then fails in all of them, and
    none waits for another that has failed.
    """
    memory = torch.get_device_module(device)
    can_limit = hasattr(memory, "mem_get_info") and hasattr(memory, "set_per_process_memory_fraction")
    if PartialState().num_processes == 1 or not can_limit:
        yield
        return
    free, total = memory.mem_get_info(device)
    least = min(gather_object([(free + memory.memory_reserved(device)) / total]))
    memory.set_per_process_memory_fraction(least, device)
    try:
        yield
    finally:
        memory.set_per_process_memory_fraction(1.0, device)
