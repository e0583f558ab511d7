"""The cache that a batch of ragged rows returns is the one that plain decoding returns: any turn goes on from it."""

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import CHAIN_FAMILIES, make_chain_target
from refusals import refuses
from safetensors.torch import save_file
from targets import (
    VOCAB_SIZE,
    Pair,
    equals_plain,
    make_drafter,
    make_pair,
    make_prompts,
    make_target,
    plain_and_drafted,
)
from tiny_configs import small_config
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from transformers_gumiho import GumihoModel, attached
from transformers_gumiho.generation.verification import prompt, takeover
from transformers_gumiho.generation.verification.tree_cache import TreeCache
from transformers_gumiho.internals import CACHE_NAME


EOS = 3
LENGTHS = [6, 2, 4, 5, 1, 3]
PLAIN, ASSISTED, STATIC = "plain", "assisted", "static"
PLAINLY: dict[str, Any] = {"assistant_model": None}
# Of all turns plain there is nothing to compare; shorter conversations are beginnings of these.
TURNS = [*itertools.product((PLAIN, ASSISTED), repeat=3)][1:]


@pytest.fixture(params=["llama", "mistral"], scope="module")
def pair(request: pytest.FixtureRequest) -> Pair:
    return make_pair(request.param, num_assistant_tokens=31)


def decode(target: PreTrainedModel, drafter: GumihoModel, turn: str, **inputs: Any) -> Any:
    """Decodes one turn, whose rows end at different lengths."""
    return target.generate(
        **inputs, max_new_tokens=12, do_sample=False, eos_token_id=EOS, return_dict_in_generate=True,
        **({} if turn == PLAIN else {"assistant_model": drafter}),
        **({"cache_implementation": "static", "disable_compile": True} if turn == STATIC else {}),
    )  # fmt: skip


def ragged_mask(mask: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Covers the new tokens of each row up to its EOS; the padding after it is masked."""
    new = sequences[:, mask.shape[1] :]
    is_end = (new == EOS).long()
    behind = is_end.cumsum(1) - is_end
    return torch.cat((mask, (behind == 0).long()), dim=1)


def converse(target: PreTrainedModel, drafter: GumihoModel, turns: tuple[str, ...], seed: int) -> list[Any]:
    """Decodes turns one after the other, each from the cache that the one before returned."""
    inputs: dict[str, Any] = make_prompts(LENGTHS, seed)
    outputs = []
    for index, turn in enumerate(turns):
        output = decode(target, drafter, turn, **inputs)
        outputs.append(output)
        mask = ragged_mask(inputs["attention_mask"], output.sequences)
        generator = torch.Generator().manual_seed(100 * seed + index)
        words = torch.randint(4, VOCAB_SIZE, (len(LENGTHS), 3), generator=generator)
        inputs = {
            "input_ids": torch.cat((output.sequences, words), dim=1),
            "attention_mask": torch.cat((mask, torch.ones_like(words)), dim=1),
            CACHE_NAME: output[CACHE_NAME],
        }
    return outputs


@pytest.fixture(scope="module")
def plain_turns(pair: Pair) -> list[list[torch.Tensor]]:
    """For each seed, the text after each turn."""
    turns = [converse(*pair, (PLAIN,) * 3, seed) for seed in range(2)]
    texts = [[output.sequences for output in outputs] for outputs in turns]
    ends = [(first[:, 6:] == EOS).long() for first, *_ in texts]
    num_ends = [len({int(row.argmax()) for row in rows if row.any()}) for rows in ends]
    assert min(num_ends) > 1, "rows must have ended at different lengths"
    return texts


@pytest.mark.parametrize("turns", TURNS, ids="-".join)
def test_turns_of_ragged_batches_equal_plain_ones(
    pair: Pair, plain_turns: list[list[torch.Tensor]], turns: tuple[str, ...]
) -> None:
    for seed, texts in enumerate(plain_turns):
        for expected, output in zip(texts, converse(*pair, turns, seed), strict=True):
            assert torch.equal(output.sequences, expected)


@pytest.mark.parametrize("turn", [ASSISTED, STATIC])
def test_every_row_holds_the_entries_of_all_its_tokens(pair: Pair, turn: str) -> None:
    """Also where several rows end in the last cycle, at different lengths, and no pass over a tree comes after."""
    num_ended_before = 0
    for seed in range(6):
        prompts = make_prompts(LENGTHS, seed)
        plain, drafted = (decode(*pair, name, **prompts) for name in (PLAIN, turn))
        mask = ragged_mask(prompts["attention_mask"], plain.sequences)[:, :-1].bool()
        num_ended_before += int((~mask[:, -1]).sum())
        expected, cache = plain[CACHE_NAME], drafted[CACHE_NAME]
        assert isinstance(cache, DynamicCache)
        assert cache.get_seq_length() == expected.get_seq_length() == mask.shape[1]
        for ours, theirs in zip(cache.layers, expected.layers, strict=True):
            assert ours.keys.shape == theirs.keys.shape
            held = mask[:, -ours.keys.shape[2] :]
            for name in ("keys", "values"):
                entries = (getattr(layer, name).transpose(1, 2)[held] for layer in (ours, theirs))
                torch.testing.assert_close(*entries, atol=1e-9, rtol=1e-9)
    assert num_ended_before > 4


def make_phi(family: str, rope_type: str) -> Pair:
    """A pair whose target drops caches of at most 16 tokens once the text is longer."""
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0, "short_mscale": 1.0}
    rope = {"rope_type": rope_type, "rope_theta": 10000.0}
    if rope_type == "longrope":
        rope |= factors | {"long_mscale": 1.0, "original_max_position_embeddings": 16}
    # The encoders of images and speech are made small, too.
    make_config: Any = small_config if family == "phi4_multimodal" else AutoConfig.for_model
    config = make_config(
        family, vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, sliding_window=None,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.6,
        original_max_position_embeddings=16, rope_parameters=rope, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager").eval()
    return target, make_drafter(target, num_assistant_tokens=15)


@pytest.mark.parametrize("rope_type", ["longrope", "default"])
@pytest.mark.parametrize("family", ["phi3", "phimoe", "phi4_multimodal"])
def test_target_that_drops_a_short_cache(family: str, rope_type: str) -> None:
    """A prompt beyond the switch of Phi's rotary embedding goes into a cache that the target makes itself."""
    target, drafter = make_phi(family, rope_type)
    for lengths, chunk_size in (([20, 20], None), ([24, 19], None), ([20, 20], 10), ([24, 19], 17)):
        equals_plain(target, drafter, lengths=lengths, max_new_tokens=16, prefill_chunk_size=chunk_size)


@pytest.mark.parametrize("rope_type", ["longrope", "default"])
@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_second_turn_of_a_target_that_drops_a_short_cache(family: str, rope_type: str) -> None:
    """Phi-3 reads the complete text again."""
    target, drafter = make_phi(family, rope_type)
    words = make_prompts([8, 8], seed=5)["input_ids"]
    conversations = []
    for first, second in itertools.product((None, drafter), repeat=2):
        settings = {"do_sample": False, "return_dict_in_generate": True}
        turn = target.generate(**make_prompts([6, 6]), **settings, max_new_tokens=6, assistant_model=first)
        text, cache = torch.cat((turn.sequences, words), dim=1), turn[CACHE_NAME]
        turn = target.generate(text, **settings, max_new_tokens=12, assistant_model=second, **{CACHE_NAME: cache})
        assert turn[CACHE_NAME].get_seq_length() == turn.sequences.shape[1] - 1
        conversations.append(turn.sequences)
    assert all(torch.equal(conversation, conversations[0]) for conversation in conversations)


def test_target_that_reads_the_newest_token_alone() -> None:
    """Phi-4-multimodal forgets a text that grows beyond the switch. Drafted decoding refuses before it runs."""
    target, drafter = make_phi("phi4_multimodal", "default")
    prompts, settings = make_prompts([6, 6]), {"do_sample": False, "return_dict_in_generate": True}
    # Plain decoding runs a text of 16 tokens at most, where 17 are generated in all.
    turns = [target.generate(**prompts, **settings, max_new_tokens=11, assistant_model=a) for a in (None, drafter)]
    assert torch.equal(turns[0].sequences, turns[1].sequences)
    text = torch.cat((turns[0].sequences, prompts["input_ids"]), dim=1)
    later = {"input_ids": text, "attention_mask": None, CACHE_NAME: turns[0][CACHE_NAME], "max_new_tokens": 3}
    for call in (prompts | {"max_new_tokens": 12}, later):
        refuses(target, "drops its cache where a text grows beyond 16 tokens", drafter, **call)
    with attached(target, drafter):
        calls = [target.generate(**prompts, max_new_tokens=24, do_sample=False, **plain) for plain in ({}, PLAINLY)]
    assert torch.equal(*calls)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "qwen2_mixed", "llama4"])
def test_cache_that_records_the_past(family: str) -> None:
    """Tokens of a drafted turn can be taken back beyond a window, as those of a plain one."""
    target = make_chain_target(family) if family in CHAIN_FAMILIES else make_target(family)
    drafter = make_drafter(target, num_assistant_tokens=7)
    for number, (num_removed, num_added) in enumerate(((1, 2), (3, 1), (8, 4))):
        results = []
        kinds = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 1, 1))
        for turns in ([drafter if is_drafted else None for is_drafted in kind] for kind in kinds):
            cache = DynamicCache(config=target.config)
            cache.activate_past_recording()
            text = make_prompts([9], seed=number)["input_ids"]
            words = torch.randint(4, VOCAB_SIZE, (3, num_added), generator=torch.Generator().manual_seed(number))
            for turn, assistant in enumerate(turns):
                kwargs = {CACHE_NAME: cache, "max_new_tokens": 14, "do_sample": False}
                text = target.generate(text, **kwargs, assistant_model=assistant)
                shapes = [layer.keys.shape for layer in cache.layers]
                cache.crop(-num_removed)
                text = torch.cat((text[:, : cache.get_seq_length()], words[turn : turn + 1]), dim=1)
            results.append((text, shapes, [layer.keys for layer in cache.layers]))
        expected = results[0]
        for text, shapes, keys in results[1:]:
            assert torch.equal(text, expected[0])
            assert shapes == expected[1]
            for ours, plain in zip(keys, expected[2], strict=True):
                torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("num_allocated", [0, 1, 2])
def test_out_of_memory_while_a_cache_is_taken_over_leaves_it_whole(
    num_allocated: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plain decoding does after an error, the caller goes on from the same cache."""
    target, drafter = pair
    prompts, cache = make_prompts([9, 4]), DynamicCache(config=target.config)
    allocate, allocated = TreeCache.add_group, []

    def run_out(self: TreeCache, *args: Any) -> None:
        if len(allocated) == num_allocated:
            raise torch.OutOfMemoryError("no room")
        allocated.append(1)
        allocate(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(takeover, "MOVED_BYTES", 1)
        patch.setattr(takeover, "MOVED_SHARE", 1e-9)  # one layer at a time, as in a large cache
        patch.setattr(TreeCache, "add_group", run_out)
        with pytest.raises(torch.OutOfMemoryError):
            target.generate(**prompts, max_new_tokens=20, assistant_model=drafter, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == 9
    held = target.generate(**prompts, max_new_tokens=1, return_dict_in_generate=True)[CACHE_NAME]
    for layer, expected in zip(cache.layers, held.layers, strict=True):
        assert torch.equal(layer.keys, expected.keys)
        assert torch.equal(layer.values, expected.values)


def held_bytes(cache: DynamicCache) -> int:
    """The bytes that a cache keeps alive."""
    tensors = [states for layer in cache.layers for states in (layer.keys, layer.values) if states is not None]
    return sum({states.untyped_storage().data_ptr(): states.untyped_storage().nbytes() for states in tensors}.values())


@pytest.mark.parametrize("lengths", [[150], [150, 130]], ids=["one", "batch"])
@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt_oss"])
def test_layers_with_a_window_hold_no_more_than_it(family: str, lengths: list[int]) -> None:
    """While the call runs at most twice what plain decoding holds, and then as much."""
    config = make_target(family).config
    config.sliding_window = 32
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    drafter = make_drafter(target, num_assistant_tokens=12, branching_factor=3)
    held: dict[int, int] = {}
    running: list[TreeCache] = []

    def watched(*args: Any) -> TreeCache:
        running.append(takeover.take_over(*args))
        return running[-1]

    def watch(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        cache = running[0] if running else kwargs[CACHE_NAME]
        held[bool(running)] = max(held.get(bool(running), 0), held_bytes(cache))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt, "take_over", watched)
        target.register_forward_hook(watch, with_kwargs=True)
        # Far enough for entries to be dropped several times.
        plain, drafted = plain_and_drafted(target, drafter, lengths=lengths, max_new_tokens=90)
    assert held[True] <= 2 * held[False]
    assert held_bytes(drafted[CACHE_NAME]) <= held_bytes(plain[CACHE_NAME])
    for ours, its in zip(drafted[CACHE_NAME].layers, plain[CACHE_NAME].layers, strict=True):
        assert ours.keys.shape == its.keys.shape


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom"])
def test_a_returned_cache_can_be_saved_like_plain_decodings(family: str, tmp_path: Path) -> None:
    target = make_chain_target(family) if family == "bloom" else make_target(family)
    outputs = plain_and_drafted(target, make_drafter(target), lengths=(7,))
    pickled = []
    for output in outputs:
        cache = output[CACHE_NAME]
        tensors = {f"keys.{index}": layer.keys for index, layer in enumerate(cache.layers)}
        tensors |= {f"values.{index}": layer.values for index, layer in enumerate(cache.layers)}
        pickled.append(len(pickle.dumps(tensors)))
    # Those of the drafted call. Plain decoding itself leaves views in layers with a window.
    assert all(states.view(-1).shape[0] == states.numel() for states in tensors.values())
    save_file(tensors, tmp_path / "cache.safetensors")
    assert (tmp_path / "cache.safetensors").stat().st_size <= 1.5 * pickled[0]
    assert pickled[1] <= pickled[0]
