"""Targets that read images: the text that follows an image is plain `generate()`'s, token for token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import both, draft_rate, make_chain_drafter
from targets import equals_plain, make_drafter, make_pair, make_prompts, passes_of
from tiny_configs import small_config
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    IdeficsConfig,
    IdeficsForVisionText2Text,
    LlamaConfig,
    LlamaForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from transformers_gumiho import attach
from transformers_gumiho.internals import CACHE_NAME


IMAGE, IMAGE_START, OTHER = 9, 8, 10
WINDOW = 6
TEXT: dict[str, Any] = {
    "vocab_size": 12, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
    # Otherwise a model with random weights repeats its last token.
    "tie_word_embeddings": False,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
MIXED = {
    "head_dim": 8, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
# A vision tower of one layer that turns an image of 8 x 8 pixels into 16 patches.
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 2,
}  # fmt: skip
QWEN_VISION = {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1, "num_heads": 2, "depth": 1}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": OTHER, "vision_start_token_id": IMAGE_START}


def qwen2_vl() -> PreTrainedModel:
    """Three positions for each token, and text positions that differ from the number of tokens before."""
    vision = QWEN_VISION | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=TEXT | {"rope_parameters": MROPE}, vision_config=vision, **QWEN_IDS)
    return Qwen2VLForConditionalGeneration(config)


def qwen3_vl() -> PreTrainedModel:
    """Images that enter several layers."""
    vision = QWEN_VISION | {
        "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }  # fmt: skip
    text = TEXT | {"head_dim": 8, "rope_parameters": MROPE}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_IDS))


def gemma3(vocab_size: int = 12) -> PreTrainedModel:
    """Image tokens that see each other in both directions, and windows."""
    config = Gemma3Config(
        text_config=TEXT | MIXED | {"vocab_size": vocab_size}, vision_config=VISION, mm_tokens_per_image=4,
        image_token_id=IMAGE, boi_token_id=IMAGE_START, eoi_token_id=OTHER, tie_word_embeddings=False,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


def gemma3_outside_vocabulary() -> PreTrainedModel:
    """Images marked by a token that the embedding has no row for."""
    return gemma3(vocab_size=IMAGE)


def gemma4() -> PreTrainedModel:
    """Later layers that read the keys and values of earlier ones, and embeddings for each layer."""
    text = TEXT | MIXED | {
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 12, "hidden_size_per_layer_input": 8,
        "global_head_dim": 8, "num_global_key_value_heads": 2,
    }  # fmt: skip
    vision = VISION | {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 8}
    config = Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE, boi_token_id=IMAGE_START,
        eoi_token_id=OTHER, video_token_id=OTHER, audio_token_id=OTHER, tie_word_embeddings=False,
    )  # fmt: skip
    return Gemma4ForConditionalGeneration(config)


def paligemma() -> PreTrainedModel:
    """An update step of its own after each token, and positions that are counted from 1."""
    vision = VISION | {"model_type": "siglip_vision_model", "patch_size": 4, "vision_use_head": False}
    text = TEXT | {"model_type": "gemma", "head_dim": 8}
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, projection_dim=32)
    config.image_token_id, config.tie_word_embeddings = IMAGE, False
    return PaliGemmaForConditionalGeneration(config)


_MAKERS = (qwen2_vl, qwen3_vl, gemma3, gemma3_outside_vocabulary, gemma4, paligemma)
MODELS = {make.__name__: make for make in _MAKERS}


def make_multimodal_target(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Returns a tiny random target in float64, with weights so large that the text depends on all of its prompt."""
    target = make()
    generator = torch.Generator().manual_seed(0)
    for parameter in target.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    target.generation_config.pad_token_id = 0
    return target.double().eval()


def make_image_prompts(name: str, num_rows: int = 1, num_last: int = 3) -> dict[str, torch.Tensor]:
    """Returns prompts of text, an image of four tokens and `num_last` tokens of text; the second one has padding."""
    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> torch.Tensor:
        return torch.randint(1, IMAGE_START, (num_rows, length), generator=generator)

    image = torch.tensor([IMAGE_START] + [IMAGE] * 4).expand(num_rows, -1)
    input_ids = torch.cat((text(3), image, text(num_last)), dim=1)
    attention_mask = torch.ones_like(input_ids)
    input_ids[1:, :2] = attention_mask[1:, :2] = 0
    prompts = {"input_ids": input_ids, "attention_mask": attention_mask}
    is_image = (input_ids == IMAGE).long()
    if name.startswith("qwen"):
        pixels = torch.randn(16 * num_rows, 12, generator=generator, dtype=torch.float64)
        grid = torch.tensor([[1, 4, 4]] * num_rows)
        return prompts | {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": is_image}
    if name == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1).expand(num_rows, -1, -1)
        pixels = torch.rand(num_rows, 16, 12, generator=generator, dtype=torch.float64)
        return prompts | {"pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": is_image}
    prompts["pixel_values"] = torch.randn(num_rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return prompts | ({"token_type_ids": is_image} if name.startswith(("gemma3", "paligemma")) else {})


@pytest.mark.parametrize("name", list(MODELS))
def test_text_after_an_image_equals_plain(name: str) -> None:
    target = make_multimodal_target(MODELS[name])
    drafter = make_drafter(target, num_assistant_tokens=47)
    prompt = make_image_prompts(name)
    output = equals_plain(target, drafter, **prompt)
    assert max(output.accepted_lengths[0]) >= 2
    blank = prompt | {"pixel_values": torch.zeros_like(prompt["pixel_values"])}
    of_blank = target.generate(**blank, max_new_tokens=40, do_sample=False)
    assert not torch.equal(output.sequences, of_blank), "the image matters"
    equals_plain(target, drafter, **prompt, do_sample=True)


@pytest.mark.parametrize("num_last", [0, 3], ids=["image_last", "text_last"])
@pytest.mark.parametrize("name", list(MODELS))
def test_batch_of_images(name: str, num_last: int) -> None:
    target = make_multimodal_target(MODELS[name])
    drafter = make_drafter(target, num_assistant_tokens=47)
    equals_plain(target, drafter, **make_image_prompts(name, num_rows=2, num_last=num_last))


@pytest.mark.parametrize("name", list(MODELS))
def test_a_second_turn_goes_on_from_the_cache(name: str) -> None:
    target = make_multimodal_target(MODELS[name])
    drafter = make_drafter(target, num_assistant_tokens=47)
    prompt = make_image_prompts(name)
    texts = []
    for assistant in ({}, {"assistant_model": drafter}):
        cache = DynamicCache(config=target.config)
        settings = {"do_sample": False, CACHE_NAME: cache, **assistant}
        first = target.generate(**prompt, max_new_tokens=15, **settings)
        question = torch.cat((first, torch.tensor([[2, 5, 1]])), dim=1)
        texts.append(target.generate(question, max_new_tokens=15, **settings))
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma4"])
def test_static_cache(name: str) -> None:
    target = make_multimodal_target(MODELS[name])
    settings = {"max_new_tokens": 24, "cache_implementation": "static", "disable_compile": True}
    equals_plain(target, make_drafter(target, num_assistant_tokens=15), **make_image_prompts(name), **settings)


def test_the_drafter_reads_the_whole_prompt() -> None:
    """Also where plain decoding runs the last layers of the target on its last token alone."""
    target = make_multimodal_target(gemma4)
    drafter = make_drafter(target)
    lengths = []
    handle = drafter.fc.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    prompt = make_image_prompts("gemma4")
    target.generate(**prompt, max_new_tokens=4, assistant_model=drafter)
    handle.remove()
    assert lengths[0] == prompt["input_ids"].shape[1]


@pytest.mark.skipif(CACHE_NAME != "cache", reason="in older releases GIT takes no mask of a tree")
@pytest.mark.parametrize("lengths", [None, [5], [5, 3]], ids=["image alone", "one", "batch"])
def test_an_image_that_stands_before_the_text(lengths: list[int] | None) -> None:
    """GIT puts it there itself, so it returns more states than there are tokens and positions."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(small_config("git")).double().eval()
    target.generation_config.update(bos_token_id=1, eos_token_id=None, pad_token_id=0)
    size = target.config.vision_config.image_size
    prompt = {"pixel_values": torch.randn(len(lengths or [1]), 3, size, size, dtype=torch.float64)}
    prompt |= {"input_ids": None} if lengths is None else make_prompts(lengths)
    equals_plain(target, make_chain_drafter(target), **prompt)


def make_mllama() -> PreTrainedModel:
    """Layers that attend to the image instead of the text, through gates that are open."""
    text = TEXT | {
        "vocab_size": 24, "bos_token_id": 0, "eos_token_id": 0, "cross_attention_layers": [1, 3],
        "initializer_range": 0.4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1,
        "attention_heads": 2, "image_size": 8, "patch_size": 4, "max_num_tiles": 1, "vision_output_dim": 32,
        "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    torch.manual_seed(0)
    config = MllamaConfig(text_config=text, vision_config=vision, image_token_index=23)
    target = MllamaForConditionalGeneration(config).eval()
    for name, parameter in target.named_parameters():
        if name.endswith("attn_gate"):
            torch.nn.init.ones_(parameter)
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    return target


@pytest.mark.parametrize("lengths", [[5], [4, 7, 2]], ids=["one", "batch"])
def test_cross_attention_to_the_image_verifies_chains(lengths: list[int]) -> None:
    target = make_mllama()
    generator = torch.Generator().manual_seed(0)
    number = len(lengths)
    prompt = make_prompts(lengths) | {
        "pixel_values": 3 * torch.randn(number, 1, 1, 3, 8, 8, generator=generator),
        "aspect_ratio_ids": torch.ones(number, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(number, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(number, max(lengths), 1, 1, dtype=torch.long),
    }
    plain, drafted = both(target, lengths, **prompt, max_new_tokens=32)
    other = target.generate(**prompt | {"pixel_values": -prompt["pixel_values"]}, max_new_tokens=32)
    assert not torch.equal(plain.sequences, other), "the image must matter"
    assert 0.2 <= draft_rate(drafted.accepted_lengths) <= 0.9


@pytest.mark.parametrize(
    "layout",
    [[[1]] * 5, [[0]] + [[1]] * 4, [[0]] * 4 + [[1]], [[1, 0]] * 3 + [[0, 1]] * 2, [[1, 0]] * 3 + [[1, 1]] * 2],
    ids=str,
)
def test_a_mask_of_images_with_a_row_for_each_token(layout: list[list[int]]) -> None:
    """Idefics: new tokens see the images that the prompt's last token sees, and the images are read once."""
    vision = {
        "embed_dim": 16, "image_size": 8, "intermediate_size": 32, "patch_size": 4, "num_hidden_layers": 1,
        "num_attention_heads": 2, "hidden_act": "gelu",
    }  # fmt: skip
    config = IdeficsConfig(
        **TEXT | {"num_key_value_heads": None}, additional_vocab_size=0, initializer_range=0.4, use_resampler=False,
        alpha_initializer="ones", cross_layer_interval=2, vision_config=vision,
    )  # fmt: skip
    torch.manual_seed(0)
    target = IdeficsForVisionText2Text(config).double().eval()
    drafter = make_drafter(target)
    mask = torch.tensor([layout, layout[:1] * 2 + layout[2:]])
    pixels = torch.rand(2, mask.shape[2], 3, 8, 8, dtype=torch.float64)
    prompt = make_prompts([5, 4], vocab_size=12) | {"pixel_values": pixels, "image_attention_mask": mask}
    read = [passes_of(target.model.vision_model, lambda: equals_plain(target, drafter, **prompt))[0]]
    assert read == [2], "once in each of the two calls"


def test_types_of_tokens_go_on_as_in_plain_decoding() -> None:
    target, drafter = make_pair("gpt2")
    prompts = make_prompts([6, 4])
    types = prompts["input_ids"].flip(1)  # embedded like tokens
    drafted = equals_plain(target, drafter, **prompts, token_type_ids=types)
    other = equals_plain(target, drafter, **prompts, token_type_ids=types * 0)
    assert not torch.equal(drafted.sequences, other.sequences)
    equals_plain(target, drafter, **make_prompts([1]), token_type_ids=torch.tensor([[3]]))


class SoundLlama(LlamaForCausalLM):
    """Reads the sound of each token of a prompt. What it is for new tokens is not said."""

    def forward(self, *args: Any, sounds: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_an_unknown_argument_as_long_as_the_prompt_is_named() -> None:
    target = SoundLlama(LlamaConfig(**TEXT)).double().eval()
    drafter, prompts = make_drafter(target), make_prompts([5], vocab_size=12)
    prompts |= {"sounds": prompts["input_ids"], "max_new_tokens": 8, "do_sample": False}
    with pytest.raises(ValueError, match=r"argument 'sounds': it is as long as the prompt, \(1, 5\)"):
        target.generate(**prompts, assistant_model=drafter)
    plain = target.generate(**prompts)
    attach(target, drafter)
    assert torch.equal(target.generate(**prompts), plain)
