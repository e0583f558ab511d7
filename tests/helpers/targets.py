"""Tiny random targets of many families, and drafters for them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from transformers_gumiho import GumihoModel


# A target and a drafter for it.
Pair = tuple[PreTrainedModel, GumihoModel]
VOCAB_SIZE = 8
LARGE_TREES = {"num_assistant_tokens": 63, "branching_factor": 14, "break_even": 0.01}
WINDOW = 6

_TOKENS = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_COMMON = _TOKENS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "initializer_range": 0.6,
}  # fmt: skip
_GROUPED = _COMMON | {"num_key_value_heads": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}


def _config(model_type: str, **fields: Any) -> Callable[[], PreTrainedConfig]:
    return partial(AutoConfig.for_model, model_type, **fields)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _config("llama", **_GROUPED),
    "mistral": _config("mistral", **_GROUPED, sliding_window=WINDOW),
    "qwen2": _config("qwen2", **_GROUPED),
    "qwen2_mixed": _config("qwen2", **_GROUPED, **_MIXED, use_sliding_window=True),
    "qwen3": _config("qwen3", **_GROUPED, head_dim=8),
    # With larger weights its soft-capped logits saturate and tie.
    "gemma2": _config("gemma2", **_GROUPED | {"initializer_range": 0.2}, **_MIXED, head_dim=8),
    "gemma3": _config("gemma3_text", **_GROUPED, **_MIXED, head_dim=8),
    "phi3": _config("phi3", **_GROUPED, sliding_window=None),
    "phi3_sliding": _config("phi3", **_GROUPED, sliding_window=WINDOW),
    "mixtral": _config("mixtral", **_GROUPED, **_EXPERTS, sliding_window=None),
    "gpt_oss": _config("gpt_oss", **_GROUPED, **_MIXED, **_EXPERTS, head_dim=8, rope_parameters=None),
    "gpt2": _config("gpt2", **_TOKENS, n_embd=32, n_layer=3, n_head=4, n_positions=96, initializer_range=0.6),
    "gpt_neox": _config("gpt_neox", **_COMMON),
    "opt": _config(
        "opt", **_TOKENS, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=96, word_embed_proj_dim=16, init_std=0.6,
    ),
}  # fmt: skip


def make_target(
    family: str = "llama",
    attn_implementation: str | None = None,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int | None = None,
) -> PreTrainedModel:
    """
    Returns a tiny random target in float64, in which two orders of summation do not change an arg-max.

    The weights are large, so that the next token depends on the whole context and not only on the last token. By
    default there are three layers where they are of two kinds, so that others lie between two of a kind, and else two.
    """
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    kinds = getattr(config, "layer_types", None) or []
    num_layers = num_layers or (3 if len({*kinds}) > 1 else 2)
    config.vocab_size, config.num_hidden_layers = vocab_size, num_layers
    if kinds:
        config.layer_types = kinds[:num_layers]
    # The eager experts are the ones that know float64.
    kwargs = {"attn_implementation": attn_implementation, "experts_implementation": "eager"}
    target = AutoModelForCausalLM.from_config(config, **{name: v for name, v in kwargs.items() if v}).double().eval()
    target.generation_config.pad_token_id = 0
    return target


def make_drafter(
    target: PreTrainedModel,
    seed: int = 0,
    transition_rank: int = 0,
    target_layer_ids: list[int] | None = None,
    num_layers: int = 2,
    **settings: object,
) -> GumihoModel:
    """
    Returns a random drafter. With a vocabulary this small its trees hold many of the target's tokens all the same.
    Unless the settings say otherwise, its trees are large and it never pauses.
    """
    torch.manual_seed(seed)
    drafter = GumihoModel.from_target(
        target, intermediate_size=48, transition_rank=transition_rank, target_layer_ids=target_layer_ids,
        num_hidden_layers=num_layers,
    ).eval()  # fmt: skip
    if drafter.layer_fusion is not None:
        torch.nn.init.normal_(drafter.layer_fusion.weight, std=0.2)
    for parameter in [*drafter.mlp.parameters(), *(drafter.transition or torch.nn.Module()).parameters()]:
        torch.nn.init.normal_(parameter, std=0.3)
    for name, value in (LARGE_TREES | settings).items():
        setattr(drafter.generation_config, name, value)
    return drafter


def make_pair(family: str = "llama", seed: int = 0, num_layers: int | None = None, **settings: Any) -> Pair:
    """Returns a target of a family, and a drafter for it, which takes the settings (see `make_drafter`)."""
    target = make_target(family, seed=seed, num_layers=num_layers)
    return target, make_drafter(target, **settings)


def make_prompts(lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> dict[str, torch.Tensor]:
    """Returns random prompts of these lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    input_ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, longest - length :] = torch.randint(1, vocab_size, (length,), generator=generator)
        attention_mask[row, longest - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def plain_and_drafted(
    target: PreTrainedModel,
    drafter: Any,
    seed: int = 0,
    drafted: dict[str, Any] | None = None,
    lengths: Sequence[int] = (5,),
    **kwargs: Any,
) -> list[Any]:
    """
    Asserts that plain and drafted decoding write one text for the same arguments and seed, and leave the random
    generator in one state; returns both outputs.

    Args:
        drafted: Arguments of the drafted call alone.
        lengths: Of random prompts, unless there is another one in `kwargs`.
        kwargs: Arguments of both calls, which are greedy and write 40 tokens by default.
    """
    prompt = {} if {"input_ids", "inputs_embeds"} & {*kwargs} else make_prompts(lengths)
    kwargs = {**prompt, "max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True} | kwargs
    outputs, states = [], []
    for extra in ({}, {"assistant_model": drafter} | (drafted or {})):
        torch.manual_seed(seed)
        outputs.append(target.generate(**kwargs, **extra))
        states.append(torch.get_rng_state())
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert outputs[0].sequences.dtype == outputs[1].sequences.dtype
    assert torch.equal(*states)
    return outputs


def equals_plain(target: PreTrainedModel, drafter: Any, *args: Any, **kwargs: Any) -> Any:
    """Asserts what `plain_and_drafted` asserts; returns the drafted output."""
    return plain_and_drafted(target, drafter, *args, **kwargs)[1]


def passes_of(target: PreTrainedModel, call: Callable[[], Any]) -> tuple[int, Any]:
    """Returns how often `call` runs the target, and what it returns."""
    with reading(target) as read:
        output = call()
    return len(read), output


@contextmanager
def reading(target: PreTrainedModel) -> Iterator[list[int]]:
    """Notes how many token ids each pass reads."""
    read: list[int] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        read.append(0 if ids is None else ids.shape[1])

    handle = target.register_forward_pre_hook(note, with_kwargs=True)
    yield read
    handle.remove()
