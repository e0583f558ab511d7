"""Targets whose recurrent layers hold a draft tree: texts, states and errors are those of plain decoding."""

from typing import Any
from unittest import mock

import pytest
import torch
from chains import (
    RECURRENT_FAMILIES,
    assert_same_cache,
    both,
    draft_rate,
    make_chain_drafter,
    make_chain_target,
    partly_right_drafts,
)
from origins import Origins
from targets import make_prompts, reading
from tiny_configs import small_config
from transformers import AutoModelForImageTextToText, DynamicCache

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.drafting import candidate_generator
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.generation.verification.chains import PENDING_PER_DRAFT
from transformers_gumiho.generation.verification.mixers import chunk_length
from transformers_gumiho.generation.verification.traits import TargetTraits
from transformers_gumiho.internals import CACHE_NAME
from transformers_gumiho.model.decoding_settings import DraftingSettings
from transformers_gumiho.tools.pairs import settings_of


BATCH = [4, 17, 9]
# One family of each recurrence.
KINDS = ["qwen3_5", "kimi_linear", "falcon_h1", "mamba2", "lfm2"]
SMALL_TREES = {"num_assistant_tokens": 12, "branching_factor": 4}


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_trees_are_drafted_and_texts_equal_plain(family: str) -> None:
    target = make_chain_target(family)
    drafter = make_chain_drafter(target, **SMALL_TREES)
    for lengths, do_sample in (([5], True), (BATCH, False)):
        plain, drafted = both(target, lengths, drafter, do_sample=do_sample)
        assert len(set(plain.sequences[0].tolist())) >= 3, "the text must depend on what came before"
        assert draft_rate(drafted.accepted_lengths) >= 0.2
        assert max(drafted.tree_sizes) == 12, "more nodes than a chain has"
        assert_same_cache(drafted[CACHE_NAME], plain[CACHE_NAME])
    # Each row moves on by what it has accepted.
    assert any(len(set(cycle)) > 1 for cycle in zip(*drafted.accepted_lengths, strict=False))


def test_inside_of_a_multimodal_target() -> None:
    torch.manual_seed(0)
    target = AutoModelForImageTextToText.from_config(small_config("qwen3_5")).double().eval()
    target.generation_config.update(pad_token_id=0, use_cache=True)
    for lengths in ([5], BATCH):
        _, drafted = both(target, lengths, make_chain_drafter(target, **SMALL_TREES), do_sample=False)
        assert max(drafted.tree_sizes) == 12


@pytest.mark.parametrize("family", KINDS)
def test_rows_that_ended_have_read_the_padding_of_plain_decoding(family: str) -> None:
    """So a second turn of the batch is that of plain decoding, too."""
    target = make_chain_target(family)
    drafter = make_chain_drafter(target, **SMALL_TREES)
    first = target.generate(**make_prompts(BATCH), max_new_tokens=40)
    target.generation_config.eos_token_id = [int(first[0, -22]), int(first[1, -31])]
    plain, drafted = both(target, BATCH, drafter, max_new_tokens=40)
    ends = [row.tolist().index(0, 17) if 0 in row[17:] else 57 for row in plain.sequences]
    assert len(set(ends)) > 1, "rows end apart"
    assert_same_cache(drafted[CACHE_NAME], plain[CACHE_NAME])
    target.generation_config.eos_token_id = None
    longer = torch.cat((plain.sequences, torch.tensor([[3, 7]] * 3)), dim=1)
    mask = torch.nn.functional.pad(make_prompts(BATCH)["attention_mask"], (0, longer.shape[1] - 17), value=1)
    prompt = {"input_ids": longer, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = target.generate(**prompt, **{CACHE_NAME: plain[CACHE_NAME]})
    continued = target.generate(**prompt, **{CACHE_NAME: drafted[CACHE_NAME]}, assistant_model=drafter)
    assert torch.equal(continued, expected)


@pytest.mark.parametrize("branching_factor", [1, 4])
@pytest.mark.parametrize("lengths", [[5], BATCH], ids=["one", "batch"])
def test_no_accepted_token_runs_twice(branching_factor: int, lengths: list[int]) -> None:
    """Each pass reads its nodes alone, however many drafts the passes before it have rejected."""
    target = make_chain_target("qwen3_5")
    drafter = make_chain_drafter(target, **SMALL_TREES | {"branching_factor": branching_factor})
    settings = {**make_prompts(lengths), "max_new_tokens": 80, "do_sample": False}
    plain = target.generate(**settings)
    with partly_right_drafts(plain, max(lengths), wrong_every=3), reading(target) as read:
        assert torch.equal(target.generate(**settings, assistant_model=drafter), plain)
    assert read[0] == max(lengths)
    assert max(read[1:]) == (8 if branching_factor == 1 else 13)


def test_a_pause_steps_as_plain_decoding_does() -> None:
    """A root alone is written in place, and undone in rows that have ended."""
    target = make_chain_target("bamba")
    drafter = make_chain_drafter(target, **SMALL_TREES, break_even=6.0)
    first = target.generate(**make_prompts(BATCH), max_new_tokens=60)
    target.generation_config.eos_token_id = [int(first[1, -30])]
    with observing(origins := Origins()):
        plain, drafted = both(target, BATCH, drafter, max_new_tokens=60)
    assert {"drafter", "pause"} <= set(origins.sources)
    assert_same_cache(drafted[CACHE_NAME], plain[CACHE_NAME])


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("lengths", [[5], BATCH], ids=["one", "batch"])
def test_an_interrupted_generation_leaves_a_cache_to_go_on_from(family: str, lengths: list[int]) -> None:
    """It ends within a pass, after the first layers. Rows of a batch that are apart go back to the prompt."""
    target = make_chain_target(family)
    drafter = make_chain_drafter(target, **SMALL_TREES)
    prompt, start = make_prompts(lengths), max(lengths)
    plain = target.generate(**prompt, max_new_tokens=40)
    cache, passes = DynamicCache(config=target.config), []

    def interrupt(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 6:
            raise InterruptedError

    handle = target.get_decoder().layers[-1].register_forward_pre_hook(interrupt)
    with partly_right_drafts(plain, start), pytest.raises(InterruptedError):
        target.generate(**prompt, max_new_tokens=40, **{CACHE_NAME: cache}, assistant_model=drafter)
    handle.remove()
    held = cache.get_seq_length()
    assert held == start if len(lengths) > 1 else held > start
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, held + 1 - start), value=1)
    text = {"input_ids": plain[:, : held + 1], "attention_mask": mask, "max_new_tokens": 40 - (held + 1 - start)}
    assert torch.equal(target.generate(**text, **{CACHE_NAME: cache}), plain)


def test_rows_that_went_beyond_the_end_of_the_text() -> None:
    """Without an end token the rows end together, with the slowest: what is beyond is taken back out of the states."""
    target = make_chain_target("qwen3_5")
    drafter = make_chain_drafter(target, **SMALL_TREES)

    def is_long(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 17 + 30)

    plain, drafted = both(target, BATCH, drafter, stopping_criteria=[is_long], max_new_tokens=60)
    assert plain.sequences.shape[1] == 17 + 30
    assert_same_cache(drafted[CACHE_NAME], plain[CACHE_NAME])


@pytest.mark.parametrize("family", KINDS)
def test_fixed_shapes(family: str) -> None:
    target = make_chain_target(family)
    drafter = make_chain_drafter(target, **SMALL_TREES)
    for lengths in ([5], BATCH):
        plain = target.generate(**make_prompts(lengths), max_new_tokens=36, return_dict_in_generate=True)
        with partly_right_drafts(plain.sequences, max(lengths)):
            drafted = target.generate(
                **make_prompts(lengths), max_new_tokens=36, cache_implementation="static", assistant_model=drafter
            )
        assert torch.equal(drafted, plain.sequences)


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2"])
def test_in_16_bits_trees_are_as_near_to_single_tokens_as_chunks_are(family: str) -> None:
    target = make_chain_target(family).bfloat16()
    drafter = make_chain_drafter(target, **SMALL_TREES)
    settings = {**make_prompts([9]), "max_new_tokens": 24, "do_sample": False}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    plain = target.generate(**settings)
    text = plain.sequences[:, :-1]
    whole = target(input_ids=text).logits[:, 8:]
    with partly_right_drafts(plain.sequences, 9):
        drafted = target.generate(**settings, assistant_model=drafter)
    num_same = next(
        (
            n
            for n, pair in enumerate(zip(*(o.sequences[0, 9:].tolist() for o in (plain, drafted)), strict=True))
            if pair[0] != pair[1]
        ),
        24,
    )
    assert num_same >= 6
    expected = torch.stack(plain.logits, dim=1)[0, :num_same].float()
    found = torch.stack(drafted.logits, dim=1)[0, :num_same].float()
    noise = (whole[0, :num_same].float() - expected).norm()
    assert (found - expected).norm() <= 1.5 * noise


def test_functions_that_a_user_puts_in_place_verify_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bamba import modeling_bamba

    plain = modeling_bamba.mamba2_chunk_scan

    def scan(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    target = make_chain_target("bamba")
    assert not TargetTraits.of(target).is_chain
    monkeypatch.setattr(modeling_bamba, "mamba2_chunk_scan", scan)
    assert TargetTraits.of(target).is_chain
    both(target, [5])


def test_a_cycle_costs_its_nodes_alone_where_no_accepted_token_runs_twice(calls_of: Any) -> None:
    """Other states run tokens again, and delta rules as chains are padded to chunks of 64."""
    estimated = calls_of(candidate_generator, "estimate_break_even")
    for family, expected in (("granite_hybrid", 12), ("bloom", 7), ("zaya", 7 * (1 + PENDING_PER_DRAFT / 2))):
        target = make_chain_target(family)
        drafter = make_chain_drafter(target, **SMALL_TREES, break_even=None)
        target.generate(**make_prompts([5]), max_new_tokens=4, assistant_model=drafter)
        assert estimated[-1].args[4] == expected
    target = make_chain_target("qwen3_5")
    assert chunk_length(target.get_decoder()) == 64
    assert chunk_length(make_chain_target("bamba").get_decoder()) == 16


def test_trees_are_small_by_default_on_accelerators() -> None:
    target = make_chain_target("mamba2")
    drafter = make_chain_drafter(target, num_assistant_tokens=None, branching_factor=None)
    own = drafter.generation_config
    with mock.patch.object(GumihoModel, "device", torch.device("cuda")):  # also where tuning begins
        assert settings_of(target, drafter).num_assistant_tokens == 16
    for has_states, size in ((True, (16, 4)), (False, (63, 14))):
        settings = DraftingSettings.from_generation_config(own, drafter.config, None, 1, "cuda", has_states)
        assert (settings.num_assistant_tokens, settings.branching_factor) == size


def test_a_returned_cache_records_its_past_as_plain_decodings_does() -> None:
    target = make_chain_target("lfm2")
    drafter, texts = make_chain_drafter(target, **SMALL_TREES), []
    for assistant in ({}, {"assistant_model": drafter}):
        call = make_prompts([5]) | {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
        first = target.generate(**call, **assistant)
        cache, text = getattr(first, CACHE_NAME), first.sequences
        cache.activate_past_recording()
        with torch.no_grad():
            target(text[:, -1:], **{CACHE_NAME: cache})
            target(text[:, :6], **{CACHE_NAME: cache})
        cache.crop(-4)
        if assistant:
            with pytest.raises(ValueError, match=r"states that record their past \(`activate_past_recording`\)"):
                target.generate(text[:, -1:].repeat(1, 20), **{CACHE_NAME: cache}, **assistant, max_new_tokens=4)
        with torch.no_grad():
            logits = target(text[:, :1], **{CACHE_NAME: cache}).logits
        texts.append((text, logits))
    assert texts[0][0].equal(texts[1][0])
    torch.testing.assert_close(texts[0][1], texts[1][1])
