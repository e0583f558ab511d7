"""The drafter as a model of transformers: configuration, checkpoints, forward pass, training behavior."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import HIDDEN_SIZE, VOCAB_SIZE, small_config, write_checkpoint
from targets import FAMILIES, equals_plain, make_drafter, make_pair, make_prompts, make_target
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, MambaConfig, PreTrainedConfig, RwkvConfig

import transformers_gumiho
from transformers_gumiho import GumihoConfig, GumihoModel, GumihoOutput
from transformers_gumiho.generation import hooks
from transformers_gumiho.internals import attention_implementation
from transformers_gumiho.model.parallel_heads import run_batched_heads
from transformers_gumiho.training.unrolling import unroll_serial_head


def make_model(**overrides: Any) -> GumihoModel:
    torch.manual_seed(0)
    model = GumihoModel(small_config(**overrides)).eval()
    for parameter in model.mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def make_inputs(batch_size: int = 2, num_tokens: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, VOCAB_SIZE, (batch_size, num_tokens), generator=generator),
        "hidden_states": torch.randn(batch_size, num_tokens, HIDDEN_SIZE, generator=generator),
    }


def assert_same(found: GumihoOutput, expected: GumihoOutput, start: int = 0) -> None:
    """Compares all features, those of `found` from a position on."""
    close = torch.testing.assert_close
    close(found.serial_features[:, start:], expected.serial_features)
    close(found.parallel_features[:, :, start:], expected.parallel_features)
    pairs = zip(found.unrolled_features or (), expected.unrolled_features or (), strict=True)
    for ours, theirs in pairs:
        close(ours[:, start:], theirs)


def test_config_given_by_folder_loads_weights_without_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config.json").rename(tmp_path / "config" / "config.json")
    model = GumihoModel.from_pretrained(tmp_path, config=tmp_path / "config")
    assert model.config.model.hidden_size == HIDDEN_SIZE


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def test_pickle_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path)
    torch.save({"fc.bias": RunsCode()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights_only|unsupported|not allowed|pickle"):
        GumihoModel.from_pretrained(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM, GumihoModel])
def test_unfit_checkpoints_are_refused(tmp_path: Path, auto_class: Any) -> None:
    weights = write_checkpoint(tmp_path)
    for change, message in (
        (lambda w: w.pop("mlp.3.2.linear.bias"), r"missing: mlp\.3\.2\.linear\.bias"),
        (lambda w: w.update({"mlp.5.0.linear.bias": torch.zeros(32)}), r"unexpected: mlp\.5\.0\.linear\.bias"),
        (lambda w: w.update({"fc.weight": torch.zeros(32, 60)}), r"wrong shape: fc\.weight is \(32, 60\), expected"),
    ):
        changed = dict(weights)
        change(changed)
        torch.save(changed, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=message):
            auto_class.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_serial_tokens": 0}, "`num_serial_tokens` must be at least 1, got 0"),
        ({"num_parallel_heads": -1}, "`num_parallel_heads` must be at least 0, got -1"),
        ({"num_residual_blocks": -1}, "`num_residual_blocks` must be at least 0, got -1"),
        ({"embedding_size": 0}, "`embedding_size` must be at least 1, or None, got 0"),
        ({"target_layer_ids": []}, r"`target_layer_ids` must be None or numbers of layers in rising order.* got \[\]"),
        ({"target_layer_ids": [4, 3, -1]}, r"numbers of layers in rising order, from 0 up, got \[4, 3, -1\]"),
        ({"model": {"model_type": "gpt2"}}, "must describe a Llama .* got model_type 'gpt2'"),
        ({"num_serial_tokens": "two"}, "num_serial_tokens"),
    ],
)
def test_config_is_validated(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=message):
        GumihoConfig(**fields)
    small_config().save_pretrained(tmp_path)
    if "model" not in fields:
        with pytest.raises(ValueError, match=message):  # also where it replaces what is in the file
            GumihoConfig.from_pretrained(tmp_path, **fields)


@pytest.mark.parametrize("config_class", [MambaConfig, RwkvConfig])
def test_from_target_without_attention_heads(config_class: type[PreTrainedConfig]) -> None:
    layers = GumihoConfig.from_target(config_class(vocab_size=500, hidden_size=768)).model
    assert (layers.num_hidden_layers, layers.hidden_size, layers.vocab_size) == (2, 768, 500)
    assert layers.num_attention_heads == layers.num_key_value_heads == 12
    assert GumihoConfig.from_target(config_class(hidden_size=40)).model.num_attention_heads == 1


class _LayersOfTwoKinds(LlamaConfig):
    """A config as transformers makes them where layers differ: what they differ in has no single value."""

    @property
    def per_layer_config(self) -> list[LlamaConfig]:
        return [LlamaConfig(num_attention_heads=heads, num_key_value_heads=4) for heads in (4, 16)]

    def __getattribute__(self, name: str) -> Any:
        if name == "num_attention_heads":
            raise RuntimeError("'num_attention_heads' is a per-layer attribute")
        return super().__getattribute__(name)


def test_from_target_whose_layers_differ() -> None:
    target = object.__new__(_LayersOfTwoKinds)
    vars(target).update(vars(LlamaConfig(vocab_size=500, hidden_size=64, num_key_value_heads=4)))
    layers = GumihoConfig.from_target(target).model
    assert (layers.num_attention_heads, layers.num_key_value_heads) == (16, 4)


def test_from_target_takes_the_rotary_parameters_of_layers_that_have_any() -> None:
    target = LlamaConfig(hidden_size=64, num_attention_heads=4)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    target.rope_parameters = {"sliding_attention": rope, "full_attention": None}
    assert GumihoConfig.from_target(target).model.rope_parameters == rope


def test_from_target_refuses_unknown_overrides() -> None:
    with pytest.raises(TypeError, match=r"Neither GumihoConfig nor LlamaConfig has the fields \['num_heads'\]"):
        GumihoConfig.from_target(LlamaConfig(), num_heads=3)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_from_target_copies_the_embedding(family: str) -> None:
    target = make_target(family)
    drafter = GumihoModel.from_target(target, num_parallel_heads=3, intermediate_size=40)
    assert torch.equal(drafter.embed_tokens.weight, target.get_input_embeddings().weight)
    assert drafter.dtype == target.dtype
    assert drafter.config.model.num_hidden_layers == 2
    assert drafter.config.model.intermediate_size == 40
    assert drafter.config.num_parallel_heads == 3


def test_forward_follows_the_architecture() -> None:
    """The serial head and the parallel heads, written out from the description of the architecture."""
    model, inputs = make_model(), make_inputs()
    output = model(**inputs)
    ids, states = inputs["input_ids"], inputs["hidden_states"]
    features = model.fc(torch.cat((model.embed_tokens(ids), states), dim=-1))
    positions = torch.arange(ids.shape[1])[None]
    rotary = model.rotary_emb(features, positions)
    causal = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    for index, layer in enumerate(model.layers):
        normed = layer.input_layernorm(features) if index else features
        features = features + layer.self_attn(normed, position_embeddings=rotary, attention_mask=causal)[0]
        features = features + layer.mlp(layer.post_attention_layernorm(features))
    torch.testing.assert_close(output.serial_features, features)

    assert output.parallel_features.shape == (2, 5, 7, HIDDEN_SIZE)
    for position in range(7):
        fused = [
            model.fc(torch.cat((model.embed_tokens(ids[:, position + k]), features[:, position + k - 1]), dim=-1))
            for k in (1, 2)
        ]
        for index, head in enumerate(model.mlp):
            hidden = torch.nn.functional.silu(head[0].linear(torch.cat(fused, dim=-1)))
            for block in head[1:]:
                hidden = hidden + torch.nn.functional.silu(block.linear(hidden))
            torch.testing.assert_close(output.parallel_features[:, index, position], hidden)


@pytest.mark.parametrize("num_serial_tokens", [1, 2, 3])
def test_unrolled_features_are_those_of_drafting(num_serial_tokens: int) -> None:
    """At each position, one run of the serial head over the text up to there, going on from its own features."""
    model, inputs = make_model(num_serial_tokens=num_serial_tokens), make_inputs()
    ids, states = inputs["input_ids"], inputs["hidden_states"]
    output = model(**inputs, unroll=unroll_serial_head)
    assert [features.shape[1] for features in output.unrolled_features] == [8, 7][: num_serial_tokens - 1]
    torch.testing.assert_close(output.serial_features, model(**inputs).serial_features)
    for position in range(9 - num_serial_tokens):
        fused = model.fuse(ids[:, : position + 1], states[:, : position + 1])
        path_inputs = []
        for step in range(1, num_serial_tokens + 1):
            feature = model.run_serial_head(fused)[:, -1:]
            if step > 1:
                unrolled = output.unrolled_features[step - 2]
                torch.testing.assert_close(unrolled[:, position : position + 1], feature)
            path_inputs.append(model.fuse(ids[:, position + step : position + step + 1], feature))
            fused = torch.cat((fused, path_inputs[-1]), dim=1)
        heads = model.mlp(torch.cat(path_inputs[:num_serial_tokens], dim=-1))
        torch.testing.assert_close(output.parallel_features[:, :, position : position + 1], heads)


@pytest.mark.parametrize("num_serial_tokens", [1, 2, 3])
def test_short_texts_unroll_as_the_beginnings_of_long_ones(num_serial_tokens: int) -> None:
    model, inputs = make_model(num_serial_tokens=num_serial_tokens), make_inputs()
    whole = model(**inputs, unroll=unroll_serial_head)
    for length in range(1, num_serial_tokens + 3):
        short = {name: values[:, :length] for name, values in inputs.items()}
        output = model(**short, unroll=unroll_serial_head)
        torch.testing.assert_close(output.serial_features, whole.serial_features[:, :length])
        num_paths = max(length - num_serial_tokens, 0)
        torch.testing.assert_close(output.parallel_features, whole.parallel_features[:, :, :num_paths])
        for step, (found, expected) in enumerate(
            zip(output.unrolled_features, whole.unrolled_features, strict=True), start=1
        ):
            torch.testing.assert_close(found, expected[:, : max(length - step, 0)])


@pytest.mark.parametrize("unroll", [None, unroll_serial_head])
def test_texts_packed_into_a_row_do_not_see_each_other(unroll: Callable[..., Any] | None) -> None:
    model, inputs = make_model(), make_inputs()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    packed = model(**inputs, position_ids=positions, unroll=unroll)
    alone = model(inputs["input_ids"][:, 4:], inputs["hidden_states"][:, 4:], unroll=unroll)
    assert_same(packed, alone, start=4)


def test_unrolling_refuses_a_cache() -> None:
    with pytest.raises(ValueError, match="`unroll` reads a text in one pass"):
        make_model()(**make_inputs(), unroll=unroll_serial_head, use_cache=True)


def test_batched_heads_equal_the_heads_one_by_one_after_training_and_loading() -> None:
    model, inputs = make_model(), torch.randn(2, 3, 2 * HIDDEN_SIZE)
    before = model.mlp.batched_weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.mlp(inputs).square().sum().backward()
    optimizer.step()
    for num_heads in (1, 5):
        torch.testing.assert_close(run_batched_heads(before, inputs, num_heads), model.mlp(inputs)[:, :num_heads])
    model.double()
    after = run_batched_heads(model.mlp.batched_weights(), inputs.double(), 5)
    torch.testing.assert_close(after, model.mlp(inputs.double()))


def test_generating_in_inference_mode_leaves_the_drafter_trainable() -> None:
    target, drafter = make_pair()
    with torch.inference_mode():
        target.generate(**make_prompts([5]), max_new_tokens=8, assistant_model=drafter)
    prompt = make_prompts([9])["input_ids"]
    states = target.model(prompt).last_hidden_state.detach()
    drafter(prompt[:, 1:], states[:, :-1]).parallel_features.sum().backward()
    assert drafter.mlp[4][5].linear.weight.grad.any()


def test_replaced_linear_layers_are_run_as_they_are() -> None:
    target, drafter = make_pair(num_assistant_tokens=47)
    block = drafter.mlp[0][0]
    block.linear = type("Wrapped", (torch.nn.Linear,), {})(
        block.linear.in_features, block.linear.out_features
    ).double()
    assert drafter.mlp.batched_weights() is None
    equals_plain(target, drafter, max_new_tokens=20)


def test_cache_continues_the_serial_head() -> None:
    model, inputs = make_model(), make_inputs()
    whole = model(**inputs).serial_features
    first = model(**{name: value[:, :5] for name, value in inputs.items()}, use_cache=True)
    rest = model(**{name: value[:, 5:] for name, value in inputs.items()}, cache=first.cache)
    torch.testing.assert_close(torch.cat((first.serial_features, rest.serial_features), dim=1), whole)
    assert model(**inputs).cache is None
    assert rest.cache.get_seq_length() == inputs["input_ids"].shape[1]
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated.*Use `cache` instead"):
        model(**inputs, past_key_values=rest.cache)


@pytest.mark.parametrize("unroll", [None, unroll_serial_head])
def test_left_padding_changes_nothing(unroll: Callable[..., Any] | None) -> None:
    model, inputs = make_model(), make_inputs(1)
    alone = model(**inputs, unroll=unroll)
    padded = {name: torch.cat((torch.ones_like(value[:, :3]), value), dim=1) for name, value in inputs.items()}
    mask = torch.tensor([[0] * 3 + [1] * 9])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(**padded, attention_mask=mask, position_ids=positions, unroll=unroll)
    assert_same(output, alone, start=3)
    assert all(torch.isfinite(features).all() for features in output.unrolled_features or ())


def test_sdpa_equals_eager() -> None:
    model, inputs = make_model(), make_inputs()
    outputs = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert attention_implementation(model.layers[0].self_attn.config) == implementation
        outputs.append(model(**inputs))
    assert_same(*outputs)


def test_attentions_and_hidden_states() -> None:
    model = make_model()
    model.set_attn_implementation("eager")
    output = model(**make_inputs(), output_attentions=True, output_hidden_states=True)
    assert [tuple(attention.shape) for attention in output.attentions] == [(2, 4, 9, 9)] * 2
    assert torch.equal(output.hidden_states[-1], output.serial_features)


def checkpoint_layers(model: GumihoModel) -> None:
    # The old name is deprecated in newer releases of transformers, and the only one in older releases.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert all(layer.gradient_checkpointing for layer in model.layers)


def wrap_layers(model: GumihoModel) -> None:
    """As FSDP does where it is told to keep no activations: the layers run twice, with all their arguments."""
    model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)


@pytest.mark.parametrize("change", [checkpoint_layers, wrap_layers])
@pytest.mark.parametrize("unrolling", [{}, {"unroll": unroll_serial_head}], ids=["text", "unrolled"])
def test_layers_that_keep_no_activations_have_the_same_gradients(
    change: Callable[[GumihoModel], None], unrolling: dict[str, Any]
) -> None:
    gradients = []
    for changed in (False, True):
        model = make_model().train()
        parameters = list(model.parameters())
        if changed:
            change(model)
        output = model(**make_inputs(), **unrolling)
        features = [output.serial_features, output.parallel_features, *(output.unrolled_features or ())]
        sum(feature.square().sum() for feature in features).backward()
        gradients.append([parameter.grad for parameter in parameters])
    assert all(gradient is not None for gradient in gradients[0])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_wrong_shapes_are_refused() -> None:
    inputs = make_inputs()
    with pytest.raises(ValueError, match=r"must have shape \(batch, tokens, 32\).*got \(2, 9, 16\)"):
        make_model()(inputs["input_ids"], inputs["hidden_states"][:, :, :16])


def test_a_second_import_drafts_as_the_first() -> None:
    """As notebooks and servers that load their code anew do it."""
    script = """
import sys
sys.path.insert(0, "tests/helpers")
from targets import make_drafter, make_prompts, make_target, passes_of
import transformers_gumiho as first
target = make_target()
old, call = make_drafter(target), make_prompts([5]) | {"max_new_tokens": 24, "do_sample": False}
first.attach(target, old)
first.detach(target)
for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_gumiho"]:
    del sys.modules[name]
import transformers, transformers_gumiho as second
assert second.GumihoModel is transformers.GumihoModel is not first.GumihoModel
new = second.GumihoModel(second.GumihoConfig.from_dict(old.config.to_dict())).double().eval()
new.load_state_dict(old.state_dict())
new.set_generation_config(old.generation_config)
plain = target.generate(**call)
num_passes, text = passes_of(target, lambda: target.generate(**call, assistant_model=new))
assert text.equal(plain) and num_passes < 16
for drafter in (old, new):
    assert passes_of(target, lambda: target.generate(**call, assistant_model=drafter))[0] == num_passes, "with trees"
second.attach(target, new)
assert passes_of(target, lambda: target.generate(**call))[0] == num_passes
second.detach(target)
assert passes_of(target, lambda: target.generate(**call))[0] == 24
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert not ran.returncode, ran.stderr


def test_other_assistants_keep_transformers_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    target, small = make_target(), make_target(seed=1)
    prompt = make_prompts([5])
    monkeypatch.setattr(hooks, "decode_with_tree", lambda *args, **kwargs: pytest.fail("took the tree"))
    plain = target.generate(**prompt, max_new_tokens=20, do_sample=False)
    for assistant in ({"assistant_model": small}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(target.generate(**prompt, max_new_tokens=20, do_sample=False, **assistant), plain)
    with pytest.raises(ValueError, match="num_return_sequences has to be 1"):
        target.generate(**prompt, num_return_sequences=2, do_sample=True, assistant_model=small)


def test_mixin_serves_classes_with_decoding_methods_of_their_own() -> None:
    from transformers import LlamaForCausalLM

    class OwnLlama(LlamaForCausalLM):
        def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("own assisted decoding")

    class OwnLlamaWithTrees(transformers_gumiho.GumihoGenerationMixin, OwnLlama):
        pass

    stock = make_target()
    target = OwnLlamaWithTrees(stock.config).double().eval()
    target.load_state_dict(stock.state_dict())
    prompt = make_prompts([5])
    plain = stock.generate(**prompt, max_new_tokens=20, do_sample=False)
    drafted = target.generate(**prompt, max_new_tokens=20, do_sample=False, assistant_model=make_drafter(stock))
    assert torch.equal(drafted, plain)
    with pytest.raises(NotImplementedError, match="own assisted decoding"):
        target.generate(**prompt, max_new_tokens=20, assistant_model=make_target(seed=1))
