"""Greedy decoding equals plain `generate()` token for token, on every family, attention and batch size."""

import pytest
import torch
from targets import FAMILIES, WINDOW, equals_plain, make_drafter, make_prompts, make_target
from tiny_configs import small_config
from transformers import AutoModelForCausalLM, ModernBertDecoderConfig


EAGER_ONLY = ("gemma2", "gpt_oss")
CASES = [
    (family, implementation)
    for family in FAMILIES
    for implementation in (("eager",) if family in EAGER_ONLY else ("eager", "sdpa"))
]


# Trees of both kinds for each family.
KINDS = [(family, name, name == "eager") for family, name in CASES]
KINDS += [(family, "eager", False) for family in EAGER_ONLY]


@pytest.mark.parametrize(("family", "implementation", "full_tree_attention"), KINDS)
def test_greedy_equals_plain(family: str, implementation: str, full_tree_attention: bool) -> None:
    target = make_target(family, implementation)
    drafter = make_drafter(target, num_assistant_tokens=47, full_tree_attention=full_tree_attention)
    accepted = []
    for seed, length in enumerate((1, 5, WINDOW + 9)):
        drafted = equals_plain(target, drafter, **make_prompts([length], seed), max_new_tokens=48)
        accepted += drafted.accepted_lengths[0]
    # The equality says something only where drafts are accepted and where they are rejected.
    assert max(accepted) >= 3
    assert min(accepted) <= 2


@pytest.mark.parametrize(("family", "implementation"), CASES)
def test_tokens_that_are_run_alone_equal_plain(family: str, implementation: str) -> None:
    """While a drafter is paused the target runs one token at a time: after short texts and beyond a window."""
    target = make_target(family, implementation)
    drafter = make_drafter(target, num_assistant_tokens=12, break_even=50.0)  # more than any tree gains
    for lengths in ([1], [WINDOW + 9], [4, 4]):
        drafted = equals_plain(target, drafter, lengths=lengths, max_new_tokens=32)
        assert drafted.tree_sizes.count(0) > 12


def test_tokens_that_are_run_alone_have_the_masks_that_eager_attention_adds_unseen() -> None:
    """In a dictionary of masks this model takes what it is given, also where plain decoding makes a mask of zeros."""
    torch.manual_seed(0)
    config = ModernBertDecoderConfig(
        vocab_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        local_attention=2 * WINDOW, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        cls_token_id=1, sep_token_id=1, initializer_range=0.6,
    )  # fmt: skip
    for implementation in ("eager", "sdpa"):
        target = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double().eval()
        target.generation_config.update(pad_token_id=0, eos_token_id=None)
        drafter = make_drafter(target, num_assistant_tokens=12, break_even=50.0)
        for length in (1, WINDOW + 9):
            drafted = equals_plain(target, drafter, lengths=[length], max_new_tokens=32)
            assert drafted.tree_sizes.count(0) > 12


# Also where the left padding of a row is longer than the target's window.
WINDOWS = [("mistral", 11, [117, 1]), ("mixtral", 11, [2, 1, 24, 1]), ("starcoder2", 2, [1, 98, 114])]
WINDOWS += [("mistral", 1, [7, 2])]


@pytest.mark.parametrize(
    ("family", "window", "lengths"), [*((family, None, [3, WINDOW + 9, 1, 7]) for family in FAMILIES), *WINDOWS]
)
def test_each_row_of_a_batch_equals_its_own_single_run(family: str, window: int | None, lengths: list[int]) -> None:
    if window is None:
        target = make_target(family)
    else:
        torch.manual_seed(0)
        config = small_config(family, num_hidden_layers=3, sliding_window=window)
        # The eager experts are the ones that know float64.
        target = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
        target.generation_config.update(eos_token_id=None, pad_token_id=0)
    if family == "gemma2":
        # Eager attention of transformers turns padding into NaN in float64, as it takes its softmax in float32.
        target = target.float()
    drafter = make_drafter(target, num_assistant_tokens=47)
    batch = make_prompts(lengths)
    drafted = target.generate(
        **batch, max_new_tokens=32, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
    )
    assert len({tuple(row) for row in drafted.accepted_lengths}) > 1, "rows must have advanced by different lengths"
    for row, length in enumerate(lengths):
        # Plain decoding without a cache is what the model defines; with one, a window of a single token differs.
        single = target.generate(
            batch["input_ids"][row : row + 1, -length:], max_new_tokens=32, do_sample=False, use_cache=False
        )
        assert torch.equal(drafted.sequences[row, -length - 32 :], single[0, -length - 32 :])
