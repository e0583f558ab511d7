"""A target whose table of positions ends: drafted decoding does what plain decoding does there, and up to it."""

from typing import Any

import pytest
import torch
from targets import equals_plain, make_drafter, make_pair, make_prompts
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    GPTJConfig,
    GPTNeoConfig,
    PreTrainedModel,
    XGLMConfig,
)
from transformers.generation import stopping_criteria

from transformers_gumiho import GumihoModel


SIZE = 24
TOKENS: dict[str, Any] = {"vocab_size": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SIZES: dict[str, Any] = TOKENS | {"num_layers": 2, "max_position_embeddings": SIZE}


def make_target(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "xglm":  # computes more sinusoidal positions when a text needs them
        config: Any = XGLMConfig(**SIZES, d_model=32, ffn_dim=48, attention_heads=4, init_std=0.6)
    elif kind == "gpt_neo":  # cuts its causal mask out of a table, too
        kinds = [[["global"], 2]]
        config = GPTNeoConfig(**SIZES, hidden_size=32, num_heads=4, attention_types=kinds, initializer_range=0.6)
    elif kind == "gptj":  # rotary positions out of a table
        config = GPTJConfig(**TOKENS, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=SIZE)
    else:  # counts its positions itself, so it verifies chains
        config = BartConfig(
            **TOKENS, d_model=32, decoder_ffn_dim=48, decoder_layers=2, decoder_attention_heads=4, init_std=0.6,
            max_position_embeddings=SIZE, is_decoder=True, is_encoder_decoder=False,
        )  # fmt: skip
        return BartForCausalLM(config).eval()
    return AutoModelForCausalLM.from_config(config).eval()


def with_table(family: str) -> tuple[PreTrainedModel, GumihoModel]:
    """Returns GPT-2 or OPT whose table of learned positions ends early."""
    target, _ = make_pair(family)
    target.config.max_position_embeddings = SIZE
    name = "wpe" if family == "gpt2" else "embed_positions"
    table = next(module for path, module in target.named_modules() if path.endswith(name))
    table.weight = torch.nn.Parameter(table.weight[: SIZE + 2 * (family == "opt")].detach().clone())
    return target, make_drafter(target)


def outcome(target: PreTrainedModel, **kwargs: Any) -> Any:
    try:
        return target.generate(**kwargs, do_sample=False).tolist()
    except (IndexError, RuntimeError) as error:
        return str(error)


@pytest.mark.parametrize("num_new", [SIZE - 9 + 1, SIZE - 9 + 2])
@pytest.mark.parametrize("extra", [{}, {"prompt_lookup_num_tokens": 8}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "opt", "gptj", "gpt_neo", "bart"])
def test_up_to_the_last_position_and_beyond(kind: str, extra: dict[str, Any], num_new: int) -> None:
    """The last token is chosen and not run, so a text may have one token more than there are positions."""
    if extra.get("cache_implementation") and kind in ("gpt_neo", "bart"):
        pytest.skip("chains take no static cache")
    target, drafter = with_table(kind) if kind in ("gpt2", "opt") else (make_target(kind), None)
    drafter = drafter or make_drafter(target)
    shared = {name: value for name, value in extra.items() if name == "cache_implementation"}
    ends = []
    for seed in range(3):
        prompts = make_prompts([9], seed) | {"max_new_tokens": num_new}
        plain = outcome(target, **prompts, **shared)
        assert outcome(target, **prompts, **extra, assistant_model=drafter) == plain
        ends.append(isinstance(plain, str))
    assert ends == [num_new > SIZE - 9 + 1] * 3  # all raise what plain decoding raises, or none does


def test_a_batch_whose_rows_reach_the_end_at_different_times() -> None:
    target, drafter = with_table("gpt2")
    equals_plain(target, drafter, lengths=(9, 4, 7), max_new_tokens=SIZE - 9 + 1)
    equals_plain(target, drafter, lengths=(9, 4, 7), max_new_tokens=SIZE - 9 + 1, do_sample=True)


def test_positions_that_are_computed_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """XGLM continues beyond its table. There no drafts are verified, and transformers' reminder comes as ever."""
    target = make_target("xglm")
    said: list[str] = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", said.append)
    drafter, texts = make_drafter(target), []
    for seed in range(4):
        drafted = equals_plain(target, drafter, **make_prompts([9], seed), max_new_tokens=40)
        texts.append(drafted.accepted_lengths[0])
        assert all(length == 1 for length in drafted.accepted_lengths[0][-(49 - SIZE - 1) :])
    assert max(map(max, texts)) > 1
    assert all(str(SIZE) in line and "friendly reminder" in line for line in said)
    # Plain decoding gives it for each token beyond, drafted decoding once in a call (both are logged once).
    said.clear()
    for extra, expected in (({}, True), ({"assistant_model": drafter}, True)):
        target.generate(**make_prompts([9]), max_new_tokens=SIZE - 9 + 2, do_sample=False, **extra)
        assert bool(said) is expected
        said.clear()
    for extra in ({}, {"assistant_model": drafter}):  # the last token is not counted
        target.generate(**make_prompts([9]), max_new_tokens=SIZE - 9 + 1, do_sample=False, **extra)
        assert not said


def test_rotary_positions_have_no_end() -> None:
    target, drafter = make_pair("llama")
    target.config.max_position_embeddings = SIZE
    drafted = equals_plain(target, drafter, max_new_tokens=50)
    assert max(drafted.accepted_lengths[0][-8:]) > 1
