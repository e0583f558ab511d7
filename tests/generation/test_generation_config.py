"""Every field of `GenerationConfig` is applied as in plain decoding, or refused: none is ignored without a word."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from targets import Pair, make_drafter, make_pair, make_prompts, make_target
from transformers import GenerationConfig, PreTrainedModel, SynthIDTextWatermarkingConfig, WatermarkingConfig

from transformers_gumiho import attach, attached, detach


SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 3.0}

SYNTHID = SynthIDTextWatermarkingConfig(
    ngram_len=3, keys=[654, 400, 836, 123], sampling_table_size=512, context_history_size=32
)

# For each field a call with it.
APPLIED: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 12, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 7},
    "min_length": {"min_length": 30, "eos_token_id": [1, 2, 3, 4]},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": [1, 2, 3, 4]},
    "do_sample": SAMPLED,
    "temperature": SAMPLED | {"temperature": 0.3},
    "top_k": SAMPLED | {"top_k": 2},
    "top_p": SAMPLED | {"top_p": 0.4},
    "min_p": SAMPLED | {"min_p": 0.5},
    "top_h": SAMPLED | {"top_h": 0.3},
    "typical_p": SAMPLED | {"typical_p": 0.3},
    "epsilon_cutoff": SAMPLED | {"epsilon_cutoff": 0.3},
    "eta_cutoff": SAMPLED | {"eta_cutoff": 0.5},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 5.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[5], [7], [3, 4]]},
    "renormalize_logits": SAMPLED | {"top_k": 3, "renormalize_logits": True},
    # It is for texts of one token.
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "forced_eos_token_id": {"forced_eos_token_id": 6},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 3.0), "eos_token_id": 6},
    "suppress_tokens": {"suppress_tokens": [1, 2, 3]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [1, 2, 3, 4, 6]},
    "sequence_bias": {"sequence_bias": [[[3], 4.0], [[1, 2], -5.0]]},
    "guidance_scale": {"guidance_scale": 3.0},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0, context_width=1)},
    "synthid": SAMPLED | {"watermarking_config": SYNTHID},
    "num_return_sequences": SAMPLED | {"num_return_sequences": 3},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "pad_token_id": {"pad_token_id": 7},
    "eos_token_id": {"eos_token_id": [3, 6]},
    "max_time": {"max_time": 600.0},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
    "cache_implementation": {"cache_implementation": "static", "disable_compile": True},
    "max_cache_len": {"cache_implementation": "static", "max_cache_len": 64, "disable_compile": True},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "max_matching_ngram_size": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
    "use_cache": {"use_cache": True},
}  # fmt: skip
# These leave the text of plain decoding as it is.
OTHER_EFFECTS = {
    "renormalize_logits", "forced_bos_token_id", "remove_invalid_values", "output_scores", "output_logits",
    "output_hidden_states", "return_dict_in_generate", "pad_token_id", "max_time", "prefill_chunk_size",
    "cache_implementation", "max_cache_len", "prompt_lookup_num_tokens", "max_matching_ngram_size", "use_cache",
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "constraints": {"constraints": [1]},
    "force_words_ids": {"force_words_ids": [[1]]},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "use_mtp": {"use_mtp": True},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "speculation_type": {"speculation_type": "dflash"},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
}
# Without effect on a text that plain decoding writes, too: parts of beam search and of ways that are refused above,
# what needs a tokenizer (tests of stop strings have one), and what files say of themselves.
WITHOUT_EFFECT = {
    "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory", "cache_config",
    "stop_strings", "token_healing", "compile_config", "disable_compile", "continuous_batching_config",
    "decoder_start_token_id", "bos_token_id", "is_assistant", "transformers_version",
    # Of an assistant of transformers' own, or of the config of an assistant: see the warning below.
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = make_target(attn_implementation="eager")
    return target, make_drafter(target)


def decode(target: PreTrainedModel, settings: dict[str, Any], lengths: Sequence[int] = (6,)) -> torch.Tensor:
    torch.manual_seed(5)
    defaults = {} if "generation_config" in settings else {"max_new_tokens": 24, "do_sample": False}
    output = target.generate(**make_prompts(list(lengths)), **defaults | settings)
    return getattr(output, "sequences", output)


def known(fields: dict[str, dict[str, Any]]) -> list[str]:
    """Returns those whose settings the installed release has."""
    return [name for name, settings in fields.items() if all(hasattr(GenerationConfig(), field) for field in settings)]


def test_every_field_is_listed() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert not fields - set(APPLIED) - set(REFUSED) - WITHOUT_EFFECT


# transformers' own prompt lookup, which they are compared with, takes one row alone.
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        (name, lengths)
        for name in known(APPLIED)
        for lengths in ([6], [5, 2, 4])
        if len(lengths) == 1 or "prompt_lookup_num_tokens" not in APPLIED[name]
    ],
)
def test_field_is_applied(name: str, lengths: list[int]) -> None:
    # Eager attention, as `pair` has it, turns padding into NaN in float64.
    target, drafter = make_pair()
    expected = decode(target, APPLIED[name], lengths)
    assert torch.equal(decode(target, APPLIED[name] | {"assistant_model": drafter}, lengths), expected)
    if name not in OTHER_EFFECTS:
        without = decode(target, SAMPLED if "do_sample" in APPLIED[name] and name != "do_sample" else {}, lengths)
        assert not torch.equal(expected, without)


@pytest.mark.parametrize("name", known(REFUSED))
def test_field_is_refused(pair: Pair, name: str) -> None:
    target, drafter = pair
    is_mode = name in ("num_beams", "constraints", "force_words_ids", "penalty_alpha")
    with pytest.raises(ValueError, match=r"these settings ask for `\w+`" if is_mode else f"`{name}=.* is (an|not a)"):
        decode(target, REFUSED[name] | {"assistant_model": drafter, "trust_remote_code": True})


OF_OTHER_ASSISTANTS: dict[str, Any] = {
    "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.9, "assistant_lookbehind": 3,
    "target_lookbehind": 3,
}  # fmt: skip
OF_THE_DRAFTER: dict[str, Any] = {
    "branching_factor": 2, "tree_depth": 2, "full_tree_attention": False,
    "draft_temperature": 0.5, "draft_vocabulary": [1, 2], "break_even": 5.0,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), (OF_OTHER_ASSISTANTS | OF_THE_DRAFTER).items())
@pytest.mark.parametrize("where", ["the call", "its config", "the drafter's config"])
def test_settings_without_an_effect_are_named(
    pair: Pair, where: str, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' own assistants ignore them. `generate()` itself refuses arguments that it does not know."""
    target, drafter = pair
    given = {name: value}
    if where == "its config":
        given = {"generation_config": GenerationConfig(**given, max_new_tokens=4)}
    elif where == "the drafter's config":
        if name in OF_THE_DRAFTER:
            return
        drafter, given = make_drafter(target, **given), {}
    elif not hasattr(GenerationConfig(), name):
        with pytest.raises(ValueError, match=rf"are not used by the model: \['{name}'\]"):
            decode(target, given | {"assistant_model": drafter})
        return
    for _ in range(2):
        decode(target, given | {"assistant_model": drafter})
    attach(target, drafter)
    decode(target, given)
    detach(target)
    (message,) = caplog.messages
    assert message.startswith(f"`{name}={value!r}` has no effect: ")
    advice = f"Set `assistant_model.generation_config.{name} = {value!r}`"
    assert (advice in message) == (name in OF_THE_DRAFTER)


@pytest.mark.parametrize("lengths", [[6], [5, 2, 4]])
def test_a_call_sets_the_size_of_its_tree(lengths: list[int], caplog: pytest.LogCaptureFixture) -> None:
    target, drafter = make_pair(num_assistant_tokens=20, break_even=1.0)
    settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}

    def decoded(**given: Any) -> tuple[torch.Tensor, int]:
        output = target.generate(**make_prompts(lengths), **given)
        return output.sequences, max(output.tree_sizes)

    text, size = decoded(assistant_model=drafter, **settings)
    assert size == 20
    in_config = {"generation_config": GenerationConfig(num_assistant_tokens=3, **settings)}
    for given in (settings | {"num_assistant_tokens": 3}, in_config):
        same, size = decoded(assistant_model=drafter, **given)
        assert torch.equal(same, text)
        assert size == 3
    assert (drafter.generation_config.num_assistant_tokens, drafter.generation_config.break_even) == (20, 1.0)
    with attached(target, drafter):
        assert decoded(**in_config)[1] == 3
    assert not any("num_assistant_tokens" in message for message in caplog.messages)
    with pytest.raises(ValueError, match="`num_assistant_tokens` must be an integer of at least 1, got 0"):
        decoded(assistant_model=drafter, num_assistant_tokens=0, **settings)
