"""What cannot work is refused before any model runs, with the cause and the way out."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed
from accelerate import cpu_offload
from chains import make_chain_drafter, make_chain_target
from refusals import refuses
from targets import make_drafter, make_prompts, make_target
from tiny_configs import small_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    Blip2ForConditionalGeneration,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2ForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    VoxtralRealtimeForConditionalGeneration,
    XLMConfig,
    XLMWithLMHeadModel,
)

from transformers_gumiho import GumihoConfig, GumihoModel, attach, attached
from transformers_gumiho.generation.verification.requirements import check_target
from transformers_gumiho.internals import CACHE_NAME, set_attention_implementation


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "ask for `beam_search`.*Set `num_beams=1`"),
        ({"num_beams": 2, "do_sample": True}, "ask for `beam_sample`"),
        ({"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}, "ask for `contrastive_search`"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "`output_attentions=True` is not available"),
        ({"use_cache": False}, "Set `use_cache=True`"),
        ({"cache_implementation": "offloaded_static"}, "`cache_implementation='offloaded_static'` is not available"),
        ({"cache_implementation": "quantized"}, "`cache_implementation='quantized'` is not available"),
        ({"cache_implementation": "offloaded"}, "`cache_implementation='offloaded'` is not available"),
        ({"synced_gpus": True}, "`synced_gpus`.*Gather the parameters first"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_ways_of_generating(target: PreTrainedModel, settings: dict[str, Any], message: str) -> None:
    refuses(target, message, **settings)


class Halves(DynamicCache):
    def update(self, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(*args, **kwargs)
        return keys, values / 2


class Counts(DynamicCache):
    calls = 0


def offload(cache: DynamicCache) -> None:
    cache.offloading = True  # as an argument, it needs a device for its stream


def patch(owner: Any) -> None:
    owner.update = functools.partial(owner.update)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda config: StaticCache(config=config, max_cache_len=32), None),
        (lambda config: Halves(config=config), None),
        (lambda config: DynamicCache(config=config), offload),
        (lambda config: DynamicCache(config=config), patch),
        (lambda config: DynamicCache(config=config), lambda cache: patch(cache.layers[0])),
    ],
    ids=["static", "a subclass", "offloaded", "a patch", "a patched layer"],
)
def test_caches_of_the_caller(target: PreTrainedModel, make: Any, change: Any) -> None:
    cache = make(target.config)
    if change is not None:
        change(cache)
    message = f"ordinary `DynamicCache` on .*without an `update` of its own.*got {type(cache).__name__} with layers"
    refuses(target, f"{message}.*set `cache_implementation='static'`", **{CACHE_NAME: cache})


def test_a_subclass_that_updates_as_usual(target: PreTrainedModel) -> None:
    settings = make_prompts([5]) | {"max_new_tokens": 20, "do_sample": False}
    cache = {CACHE_NAME: Counts(config=target.config)}
    drafted = target.generate(**settings, **cache, assistant_model=make_drafter(target))
    assert torch.equal(drafted, target.generate(**settings))


@pytest.mark.parametrize("shortened", [0, -1], ids=["the first", "the last"])
def test_caches_that_lack_tokens_in_some_layers(shortened: int) -> None:
    """As code that compresses a cache leaves it: single tokens attend to what there is, and trees need masks."""
    target = make_target()
    drafter = make_drafter(target)

    def shorten(cache: DynamicCache) -> None:
        layer = cache.layers[shortened]
        layer.keys, layer.values = layer.keys[:, :, 2:], layer.values[:, :, 2:]

    def compress(layer: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        cache = kwargs.get("past_key_values", kwargs.get(CACHE_NAME))
        if kwargs["hidden_states"].shape[1] > 1:
            shorten(cache)

    message = r"layers of \w+ForCausalLM hold .* tokens of a text of \d+ in their cache"
    prompt = make_prompts([5])["input_ids"]
    cache = target(prompt[:, :-1], use_cache=True)[CACHE_NAME]
    shorten(cache)
    refuses(target, message, drafter, input_ids=prompt, attention_mask=None, **{CACHE_NAME: cache})
    attention = [module for name, module in target.named_modules() if name.endswith("self_attn")][shortened]
    attention.register_forward_hook(compress, with_kwargs=True)
    assert target.generate(prompt, max_new_tokens=8, do_sample=False).shape[1] == 13
    with pytest.raises(ValueError, match=message):
        target.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter)


@pytest.mark.parametrize(
    "step",
    [
        "_sample", "_assisted_decoding", "_update_model_kwargs_for_generation", "_has_unfinished_sequences",
        "_optimize_model_for_decode",
    ],
)  # fmt: skip
def test_steps_of_decoding_that_are_the_targets_own(target: PreTrainedModel, step: str) -> None:
    kind = type("OwnLlama", (LlamaForCausalLM,), {step: lambda *_, **__: pytest.fail("it runs")})
    own = kind(target.config).double().eval()
    refuses(own, f"OwnLlama decodes with a `{step}` of its own")
    with pytest.raises(ValueError, match=step):
        attach(own, make_drafter(target))


def test_an_update_step_that_hands_on_what_the_next_pass_reads() -> None:
    """Of transformers' own classes some do so; others are drafted for (PaliGemma, Idefics, Mllama)."""
    with torch.device("meta"):
        voxtral = VoxtralRealtimeForConditionalGeneration(small_config("voxtral_realtime"))
    with pytest.raises(ValueError, match="decodes with a `_update_model_kwargs_for_generation` of its own"):
        check_target(voxtral)


def test_encoder_decoder() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=8, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
    )
    refuses(t5, "needs a decoder-only target, and T5ForConditionalGeneration is an encoder-decoder")


def test_padding_that_a_pass_over_a_tree_would_read_differently() -> None:
    git = AutoModelForCausalLM.from_config(small_config("git")).eval()
    drafter, ids = GumihoModel.from_target(git), torch.arange(4, 12).view(2, 4)
    padded = {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])}
    with pytest.raises(ValueError, match="in a padded batch of texts without images"):
        git.generate(ids, **padded, assistant_model=drafter, max_new_tokens=4)


@pytest.mark.skipif(CACHE_NAME == "cache", reason="GIT takes the masks of trees since 5.24")
def test_git_before_it_took_masks_of_trees() -> None:
    git = AutoModelForCausalLM.from_config(small_config("git", max_position_embeddings=512)).double().eval()
    with pytest.raises(ValueError, match="cannot verify drafts: multi-token passes differ"):
        git.generate(torch.arange(4, 9)[None], assistant_model=GumihoModel.from_target(git), max_new_tokens=4)


def test_target_without_a_cache() -> None:
    gpt = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=8, n_embd=32, n_layer=1, n_head=4))
    xlm = XLMWithLMHeadModel(XLMConfig(n_words=8, emb_dim=32, n_layers=1, n_heads=4))
    for target in (gpt, xlm):
        refuses(target, "keeps no `DynamicCache` in its argument")


def test_a_target_that_hands_its_calls_on() -> None:
    """BLIP-2 generates with its language model, which drafts with what is attached to it or given to the call."""
    torch.manual_seed(0)
    config = small_config("blip-2")
    config.image_token_id = config.image_token_index = 3
    blip = Blip2ForConditionalGeneration(config).eval()
    drafter = GumihoModel.from_target(blip.language_model)
    with pytest.raises(ValueError, match=r"with its `language_model`. Attach .* `attach\(target.language_model"):
        attach(blip, drafter)
    size = config.vision_config.image_size
    ids = torch.tensor([[3] * config.num_query_tokens + [5, 6, 7]])
    prompt = {"pixel_values": torch.randn(1, 3, size, size), "input_ids": ids}
    prompt |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    plain, passes = blip.generate(**prompt), []
    drafter.fc.register_forward_hook(lambda *_: passes.append(1))
    assert blip.generate(**prompt, assistant_model=drafter).equal(plain)
    num_given = len(passes)
    with attached(blip.language_model, drafter):
        assert blip.generate(**prompt).equal(plain)
    assert len(passes) == 2 * num_given > 0


def test_a_drafter_that_is_split_over_processes(target: PreTrainedModel) -> None:
    drafter = make_drafter(target)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(drafter)
        with pytest.raises(ValueError, match=r"split over processes.*call `drafter.unshard\(\)`"):
            target.generate(**make_prompts([4]), assistant_model=drafter, max_new_tokens=4)
        drafter.unshard()
        drafted = target.generate(**make_prompts([4]), assistant_model=drafter, max_new_tokens=4)
        assert drafted.equal(target.generate(**make_prompts([4]), max_new_tokens=4))
    finally:
        torch.distributed.destroy_process_group()


class ReadsMarks(LlamaForCausalLM):
    """Its inputs need an argument that only a call has."""

    def prepare_inputs_for_generation(self, input_ids: Any, *, marks: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


def test_inputs_that_need_an_argument_of_the_call() -> None:
    target = make_target()
    target.__class__ = ReadsMarks
    refuses(target, "a trial of a few tokens .* failed .*missing 1 required keyword-only argument: 'marks'")


class PredictorCache(DynamicCache):
    """Its name holds that of a dictionary, which older models have in the place of a cache."""


class HandsOn(LlamaForCausalLM):
    """As one that was written before 5.24 looks, with `past_key_values` and all other arguments as they come."""

    def forward(
        self, input_ids: Any, position_ids: Any = None, past_key_values: PredictorCache | None = None, **kwargs: Any
    ) -> Any:
        given = {} if past_key_values is None else {"past_key_values": past_key_values}
        return super().forward(input_ids, position_ids=position_ids, **given, **kwargs)


class Drops(HandsOn):
    def forward(self, input_ids: Any, position_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("cache", None)
        return super().forward(input_ids, **kwargs)


class NamesNothing(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [HandsOn, NamesNothing])
def test_forward_around_another(target: PreTrainedModel, kind: type[PreTrainedModel]) -> None:
    drafter, prompt = make_drafter(target), make_prompts([5])
    settings = {"max_new_tokens": 20, "do_sample": False}
    around = kind(target.config).eval()
    around.load_state_dict(target.state_dict())
    drafted = around.generate(**prompt, **settings, assistant_model=drafter)
    assert torch.equal(drafted, target.generate(**prompt, **settings))


def test_states_are_taken_by_a_forward_around_another() -> None:
    """`cache_params` is what states were called before 5.24."""

    class AroundMamba2(Mamba2ForCausalLM):
        def forward(self, input_ids: Any, cache_params: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids, **({"cache_params": cache_params} if cache_params else {}), **kwargs)

    target = make_chain_target("mamba2")
    around = AroundMamba2(target.config).double().eval()
    around.load_state_dict(target.state_dict())
    settings = make_prompts([5]) | {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    drafted = around.generate(**settings, assistant_model=make_chain_drafter(target))
    assert torch.equal(drafted, target.generate(**settings))


@pytest.mark.parametrize("model_type", ["rwkv", "xlstm", "minimax"])
def test_states_beside_the_layers_of_a_cache(model_type: str) -> None:
    target = AutoModelForCausalLM.from_config(small_config(model_type)).eval()
    drafter = GumihoModel.from_target(target, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48)
    with pytest.raises(ValueError, match=f"{type(target).__name__} keeps no .* a cache or states of its own kind"):
        target.generate(**make_prompts([5]), max_new_tokens=4, assistant_model=drafter)


@pytest.mark.parametrize("is_filled", [False, True])
def test_forward_that_drops_the_cache(target: PreTrainedModel, is_filled: bool) -> None:
    drafter, prompt = make_drafter(target), make_prompts([5])
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    if is_filled:
        cache = DynamicCache(config=target.config)
        target(prompt["input_ids"][:, :3], **{CACHE_NAME: cache})
        settings[CACHE_NAME] = cache
    dropping = Drops(target.config).eval()
    with pytest.raises(ValueError, match=f"added nothing to the cache in its argument `{CACHE_NAME}`.*give its"):
        dropping.generate(**prompt, **settings, assistant_model=drafter)


def test_drafter_with_attention_that_takes_no_mask(target: PreTrainedModel) -> None:
    drafter = make_drafter(target)
    set_attention_implementation(drafter.config, "flash_attention_2")
    refuses(
        target, "drafter's attention 'flash_attention_2' takes no tree mask.*`attn_implementation='sdpa'`", drafter
    )


def test_rotary_embeddings_that_change_on_the_way() -> None:
    def rotary(**parameters: Any) -> PreTrainedModel:
        rope = {"rope_theta": 10000.0, "original_max_position_embeddings": 16} | parameters
        config = LlamaConfig(
            vocab_size=8, hidden_size=32, num_attention_heads=4, intermediate_size=48, num_hidden_layers=1,
            max_position_embeddings=16, rope_parameters=rope, eos_token_id=None,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    longrope = rotary(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, factor=4.0)
    dynamic = rotary(rope_type="dynamic", factor=2.0)
    for target, name in ((longrope, "longrope"), (dynamic, "dynamic")):
        message = f"has a '{name}' rotary embedding, which changes at 16 tokens, .* may go from 4 to 18"
        refuses(target, message, max_new_tokens=14)
        target.generate(**make_prompts([4]), max_new_tokens=12, assistant_model=make_drafter(target))
        embeds = target.get_input_embeddings()(make_prompts([4])["input_ids"])
        with pytest.raises(ValueError, match=message):
            target.generate(inputs_embeds=embeds, max_new_tokens=14, assistant_model=make_drafter(target))
        # What counts are positions, which padding before all rows does not have.
        padded = {name: torch.nn.functional.pad(value, (20, 0)) for name, value in make_prompts([4]).items()}
        refuses(target, message, **padded, max_new_tokens=14)
        target.generate(**padded, max_new_tokens=13, assistant_model=make_drafter(target))


def test_doge_beyond_the_tokens_that_it_keeps() -> None:
    config = small_config("doge")
    config.keep_window_size, config.initializer_range, config.eos_token_id = 12, 0.6, None
    doge = AutoModelForCausalLM.from_config(config).double().eval()
    drafter = make_drafter(doge)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}
    # With padding the cache holds more than it keeps, of which it can see 12.
    prompts = make_prompts([4, 2])
    drafted = doge.generate(**prompts, **settings, assistant_model=drafter)
    assert torch.equal(drafted, doge.generate(**prompts, **settings))
    refuses(doge, "attends to 12 tokens at most .*may go from 4 to 14", drafter, max_new_tokens=10)
    attach(doge, drafter)
    settings["max_new_tokens"] = 10
    assert torch.equal(
        doge.generate(**prompts, **settings), doge.generate(**prompts, **settings, assistant_model=None)
    )


def test_a_drafter_that_is_offloaded(target: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    drafter = make_drafter(target)
    offloaded = cpu_offload(make_drafter(target))
    split = make_drafter(target)
    split.fc.to("meta")
    plain = target.generate(**make_prompts([4]), max_new_tokens=8)
    for wrong in (offloaded, split):
        with pytest.raises(ValueError, match=r"are offloaded, on several devices.*device_map='cpu'"):
            target.generate(**make_prompts([4]), assistant_model=wrong)
    with attached(target, drafter):
        drafter.fc.to("meta")
        assert torch.equal(target.generate(**make_prompts([4]), max_new_tokens=8), plain)
    assert any("weights are offloaded" in message for message in caplog.messages)


def test_drafter_of_another_target(target: PreTrainedModel) -> None:
    larger = LlamaConfig(vocab_size=9, hidden_size=32, num_attention_heads=4, intermediate_size=48)
    drafter = GumihoModel(GumihoConfig.from_target(larger))
    refuses(target, "has a vocabulary of 9, but LlamaForCausalLM has one of 8", drafter)
    wider = LlamaConfig(vocab_size=8, hidden_size=64, num_attention_heads=4, intermediate_size=48)
    drafter = GumihoModel(GumihoConfig.from_target(wider))
    refuses(target, "has a hidden size of 64, but LlamaForCausalLM has one of 32", drafter)
    exchanged = make_target()
    exchanged.lm_head = torch.nn.Linear(32, 12, bias=False).double()
    refuses(exchanged, "has a vocabulary of 8, but LlamaForCausalLM has one of 12")


def test_assistant_tokenizer(target: PreTrainedModel) -> None:
    own = Tokenizer(WordLevel({"a": 0, "b": 1}))
    other = Tokenizer(WordLevel({"a": 1, "b": 0}))
    tokenizer, foreign = (PreTrainedTokenizerFast(tokenizer_object=backend) for backend in (own, other))
    message = "`assistant_tokenizer` is not known to be the target's tokenizer.*Leave it out"
    for _ in range(2):
        refuses(target, message, assistant_tokenizer=foreign, tokenizer=tokenizer)
    refuses(target, message, assistant_tokenizer=tokenizer)
