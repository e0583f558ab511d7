"""Targets that cannot verify a tree verify chains, by their own pass over their own cache, and write the same text."""

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from chains import (
    CHAIN_FAMILIES,
    INEXACT_FAMILIES,
    PARTLY_EXACT_FAMILIES,
    assert_same_cache,
    both,
    draft_rate,
    make_chain_drafter,
    make_chain_target,
    partly_right_drafts,
)
from pretend_device import pretending
from streamers import Recorder
from targets import make_prompts, passes_of, reading
from tiny_configs import small_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from transformers_gumiho.generation.verification import precision, trial
from transformers_gumiho.generation.verification.chains import PENDING_PER_DRAFT, ChainSession
from transformers_gumiho.generation.verification.traits import TargetTraits, cache_argument
from transformers_gumiho.internals import CACHE_NAME


BATCH = [4, 17, 9]


def check_text(target: PreTrainedModel, lengths: list[int], do_sample: bool = False) -> tuple[Any, Any]:
    """Asserts the same, and that the equality says something."""
    plain, drafted = both(target, lengths, do_sample=do_sample)
    assert len(set(plain.sequences[0].tolist())) >= 3, "the text must depend on what came before"
    assert 0.3 <= draft_rate(drafted.accepted_lengths) <= 0.9
    return plain, drafted


@pytest.mark.parametrize("family", CHAIN_FAMILIES)
def test_texts_equal_plain(family: str) -> None:
    target = make_chain_target(family)
    for lengths, do_sample in (([1], False), ([5], True), (BATCH, False), (BATCH, True)):
        check_text(target, lengths, do_sample)


@pytest.mark.skipif("exaone4_5" not in CONFIG_MAPPING, reason="not in this release of transformers")
@pytest.mark.parametrize("lengths", [[5], BATCH])
def test_positions_that_are_dropped_before_a_pass(lengths: list[int]) -> None:
    """Its `prepare_inputs_for_generation` drops them, and its decoder counts the slots of its cache."""
    torch.manual_seed(0)
    target = AutoModelForImageTextToText.from_config(small_config("exaone4_5")).double().eval()
    target.generation_config.pad_token_id = 0
    _, drafted = both(target, lengths, do_sample=False, eos_token_id=None)
    assert draft_rate(drafted.accepted_lengths) >= 0.3


@pytest.mark.parametrize("family", PARTLY_EXACT_FAMILIES)
def test_without_padding(family: str) -> None:
    """
    DeepSeek V4 compresses slots, and MiniMax M3 chooses blocks of them: plain decoding of padded rows is not that of
    each row.
    """
    target = make_chain_target(family)
    for lengths, do_sample in (([1], False), ([9], True), ([7, 7, 7], False), ([7, 7, 7], True)):
        check_text(target, lengths, do_sample)
    with pytest.raises(ValueError, match=r"(drafts|drafter) in a padded batch"):
        both(target, BATCH)


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        *itertools.product(["zaya", "bloom", "llama4"], ([5], BATCH)),
        ("minimax_m3", [5]),
    ],
)
def test_returned_cache_is_that_of_plain_decoding(family: str, lengths: list[int]) -> None:
    target = make_chain_target(family)
    first = target.generate(**make_prompts(lengths), max_new_tokens=40)
    # Rows end at different tokens, and padding goes through those that have ended.
    target.generation_config.eos_token_id = [int(first[0, -20])]
    plain, drafted = both(target, lengths, max_new_tokens=40)
    assert_same_cache(drafted[CACHE_NAME], plain[CACHE_NAME])
    if len(lengths) > 1:
        return
    target.generation_config.eos_token_id = None
    name = cache_argument(target)
    longer = torch.cat((plain.sequences, torch.tensor([[3, 7]])), dim=1)
    prompt = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    expected = target.generate(**prompt, **{name: plain[CACHE_NAME]}, max_new_tokens=20)
    with partly_right_drafts(expected, longer.shape[1]):
        continued = prompt | {name: drafted[CACHE_NAME], "assistant_model": make_chain_drafter(target)}
        assert torch.equal(target.generate(**continued, max_new_tokens=20), expected)


@pytest.mark.parametrize("family", ["zaya", "llama4"])
@pytest.mark.parametrize("lengths", [[5], BATCH], ids=["one", "batch"])
def test_returned_fields(family: str, lengths: list[int]) -> None:
    target = make_chain_target(family)
    settings = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "max_new_tokens": 20}
    plain, drafted = both(target, lengths, do_sample=True, top_k=9, **settings)
    assert len(plain.scores) == len(plain.logits) == 20
    for name in ("scores", "logits", "hidden_states"):
        torch.testing.assert_close(getattr(drafted, name), getattr(plain, name), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["zaya", "kimi_linear"])
@pytest.mark.parametrize("lengths", [[5], BATCH], ids=["one", "batch"])
def test_processors_criteria_and_streamers(lengths: list[int], family: str) -> None:
    target = make_chain_target(family)
    for do_sample in (False, True):
        streamer = Recorder()
        settings: dict[str, Any] = {
            "do_sample": do_sample,
            "repetition_penalty": 1.2,
            "logits_processor": [lambda ids, scores: scores.scatter(1, ids[:, -2:-1], -torch.inf)],
            "stopping_criteria": [lambda ids, scores: ids.sum(dim=1) % 6 == 0],
        }
        plain, _ = both(target, lengths, **settings, **({"streamer": streamer} if len(lengths) == 1 else {}))
        assert plain.sequences.shape[1] < max(lengths) + 36, "the criterion ends it"
        half = len(streamer.values) // 2
        assert streamer.values[:half] == streamer.values[half:]


@pytest.mark.parametrize("wrong_every", [3, 6, 12])
@pytest.mark.parametrize("family", ["zaya", "llama4"])
def test_passes_of_the_target(family: str, wrong_every: int) -> None:
    target = make_chain_target(family)
    drafter = make_chain_drafter(target)
    both(target, [5], max_new_tokens=4)  # what is tried at the first call is not tried again
    settings = {**make_prompts([5]), "max_new_tokens": 150, "return_dict_in_generate": True}
    plain = target.generate(**settings).sequences
    with partly_right_drafts(plain, 5, wrong_every=wrong_every):
        passes, drafted = passes_of(target, lambda: target.generate(**settings, assistant_model=drafter))
    assert torch.equal(drafted.sequences, plain)
    num_cycles = len(drafted.accepted_lengths[0])
    assert num_cycles < 60
    assert passes - 1 <= 1.1 * num_cycles  # the prompt is no cycle


@pytest.mark.parametrize("lengths", [[5], BATCH], ids=["one", "batch"])
def test_accepted_chains_are_kept_at_once(lengths: list[int]) -> None:
    """Where no draft is rejected, no token is read twice."""
    target = make_chain_target("zaya")
    both(target, lengths, max_new_tokens=4)  # what is tried at the first call is not tried again
    settings = {**make_prompts(lengths), "max_new_tokens": 41}
    plain = target.generate(**settings)
    with partly_right_drafts(plain, max(lengths), wrong_every=None), reading(target) as read:
        drafted = target.generate(**settings, assistant_model=make_chain_drafter(target))
    assert torch.equal(drafted, plain)
    assert read == [max(lengths)] + 5 * [8]


def test_rejected_drafts_do_not_pile_up() -> None:
    target = make_chain_target("zaya")
    drafter = make_chain_drafter(target)
    most = PENDING_PER_DRAFT * drafter.config.max_draft_depth
    settings = {**make_prompts([5]), "max_new_tokens": 2 * most}
    plain = target.generate(**settings)
    with partly_right_drafts((plain + 1) % 24, 5), reading(target) as read:
        drafted = target.generate(**settings, assistant_model=drafter)
    assert torch.equal(drafted, plain)
    assert most < max(read) <= most + 8


@pytest.mark.parametrize(
    ("family", "catches_up"),
    [("zaya", False), ("llama4", False), ("zaya", True), ("minimax_m3", False)],
)
def test_an_interrupted_generation_leaves_a_cache_to_go_on_from(
    family: str, catches_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between two cycles, or in the middle of a pass over accepted tokens alone."""

    class Breaks(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) > 5 + 12:
                raise InterruptedError

    target = make_chain_target(family)
    prompt = make_prompts([5])
    plain = target.generate(**prompt, max_new_tokens=40)
    cache = TargetTraits.of(target).make_cache()
    catch_up, in_between = ChainSession._catch_up, []  # noqa: SLF001

    def interrupt(*_: Any) -> None:
        if in_between:
            raise InterruptedError

    def catch_up_in_part(session: ChainSession, tokens: torch.Tensor) -> None:
        in_between.append(session.cache.num_pending)
        catch_up(session, tokens)

    if catches_up:
        monkeypatch.setattr(ChainSession, "_catch_up", catch_up_in_part)
        target.get_decoder().layers[-1].register_forward_pre_hook(interrupt)

    def is_long(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Inside an accepted path, as no chain knows of this end: some of its tokens are run again.
        return torch.full((len(input_ids),), input_ids.shape[1] >= 5 + 13)

    with partly_right_drafts(plain, 5), pytest.raises(InterruptedError):
        target.generate(
            **prompt,
            max_new_tokens=40,
            **{CACHE_NAME: cache},
            stopping_criteria=[is_long] if catches_up else [],
            streamer=None if catches_up else Breaks(),
            assistant_model=make_chain_drafter(target),
        )
    monkeypatch.undo()
    in_between.clear()
    assert 5 <= cache.get_seq_length() < 5 + 14
    longer = {"input_ids": plain[:, :25], "attention_mask": torch.ones(1, 25, dtype=torch.long)}
    assert torch.equal(target.generate(**longer, **{CACHE_NAME: cache}, max_new_tokens=20), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", INEXACT_FAMILIES)
def test_what_is_measured_to_differ_is_refused(family: str, dtype: torch.dtype) -> None:
    target = make_chain_target(family).to(dtype)
    with pytest.raises(ValueError, match=r"differ from single-token passes \(relative error \d.*Generate without"):
        target.generate(**make_prompts([5]), max_new_tokens=4, assistant_model=make_chain_drafter(target))


def test_low_precision_is_tried_in_float32() -> None:
    """16 bits hide neither what is right nor, above, what is wrong."""
    target = make_chain_target("zaya").bfloat16()
    assert trial.measure_continuation(target, TargetTraits.of(target)) > 1e-3
    target.generate(**make_prompts([5]), max_new_tokens=9, assistant_model=make_chain_drafter(target))


class Rounded(TorchDispatchMode):
    """Rounds what products of float32 read, as GPUs do where TF32 is allowed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            args = [arg.half().float() if arg.dtype == torch.float32 else arg for arg in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("switch", ["precision", "matmul"])
def test_a_trial_is_exact_where_products_may_be_rounded(switch: str, request: pytest.FixtureRequest) -> None:
    """And changes no setting. Its verdict holds for all calls, whatever precision the first of them runs in."""
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("PyTorch 2.9 has this switch")
    backend = torch.backends.mkldnn.matmul
    owner = backend if switch == "matmul" else torch.backends
    request.addfinalizer(partial(setattr, owner, "fp32_precision", owner.fp32_precision))
    owner.fp32_precision = "tf32"
    for family, is_exact in (("qwen3_next", True), ("nemotron_h", False)):
        target = make_chain_target(family).float()
        seen: list[str] = []
        target.register_forward_pre_hook(lambda *_, seen=seen: seen.append(backend.fp32_precision))
        with (
            Rounded(),
            torch.autocast("cpu", dtype=torch.bfloat16),
            nullcontext() if is_exact else pytest.raises(ValueError, match="tolerance 3e-04"),
        ):
            trial.check_multi_token_decode(target, TargetTraits.of(target), None)
        assert {*seen} == {"tf32"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_weights_are_converted_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an embedding nor an output head gets a copy in float32."""
    target = make_chain_target("qwen3_5").to(dtype)
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:  # noqa: SLF001
                sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = target.float()(tokens).logits
        target.to(dtype)
        monkeypatch.setattr(precision, "MAX_CONVERTED", 500)
        with Sizes(), precision.computing_precisely():
            found = target(tokens).logits
    assert max(sizes) <= 700 < target.lm_head.weight.numel()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_kernels_that_take_16_bits_alone() -> None:
    def refuse_float32(module: Any, args: Any) -> None:
        if args[0].dtype != torch.bfloat16:
            raise RuntimeError("This kernel takes bfloat16.")

    for family, is_exact in (("bloom", True), ("jamba", False)):
        target = make_chain_target(family).bfloat16()
        target.lm_head.register_forward_pre_hook(refuse_float32)
        with nullcontext() if is_exact else pytest.raises(ValueError, match="tolerance 1e-02"):
            target.generate(**make_prompts([5]), max_new_tokens=9, assistant_model=make_chain_drafter(target))


def test_what_was_measured_holds_for_what_was_measured(calls_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict depends on the very target, its config, dtype and device. NaN is no verdict."""
    measured = calls_of(trial, "_try")
    monkeypatch.setattr(trial, "MAX_VERDICTS", 1)

    def check(target: PreTrainedModel) -> int:
        measured.clear()
        trial.check_multi_token_decode(target, TargetTraits.of(target), None)
        return len(measured)

    target = make_chain_target("gpt_neo")
    target.config.note = {"no JSON"}
    target.config.vocab_size = 20
    assert (check(target), check(target)) == (1, 0)
    target.config.vocab_size = 21
    assert (check(target), check(target)) == (1, 0)
    assert check(target.float()) == 1
    assert check(target.double()) == 1, "only so many are kept"
    with pretending():
        assert check(target.to("cuda")) == 1, "another device may run other kernels"
    target.to("cpu")
    weights = target.get_output_embeddings().weight
    target.config.vocab_size, healthy = 22, weights.data.clone()
    weights.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="computes NaN"):
        check(target)
    with torch.no_grad():
        weights.copy_(healthy)
    assert (check(target), check(target)) == (1, 0)
    assert check(make_chain_target("gpt_neo")) == 1, "another target of the same class"


def test_what_fails_when_it_is_tried_is_refused() -> None:
    target = make_chain_target("bloom")

    def take_one_token(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] > 1 and kwargs[CACHE_NAME].get_seq_length() > 0:
            raise RuntimeError("One token at a time, please.")

    target.register_forward_pre_hook(take_one_token, with_kwargs=True)
    with pytest.raises(ValueError, match=r"a trial of a few tokens .* failed \(RuntimeError: One token at a time"):
        target.generate(**make_prompts([5]), max_new_tokens=4, assistant_model=make_chain_drafter(target))


def test_what_chains_do_not_allow() -> None:
    target = make_chain_target("zaya")
    drafter = make_chain_drafter(target)
    with pytest.raises(ValueError, match=r"'static'` is not available here: Zaya.* has a recurrent state"):
        target.generate(**make_prompts([5]), max_new_tokens=4, assistant_model=drafter, cache_implementation="static")
    cache = DynamicCache(config=target.config)
    cache.offloading = True  # as an argument, it needs a device for its stream
    with pytest.raises(ValueError, match=r"needs an ordinary `DynamicCache` on the target's device"):
        target.generate(**make_prompts([5]), max_new_tokens=4, assistant_model=drafter, **{CACHE_NAME: cache})

    class WindowedStates(DynamicLayer):
        pass

    cache = DynamicCache(config=target.config)
    cache.layers[1] = WindowedStates()
    with pytest.raises(ValueError, match=r"drafts can be removed, .*WindowedStates"):
        target.generate(**make_prompts([5]), max_new_tokens=4, assistant_model=drafter, **{CACHE_NAME: cache})


def test_the_log_says_once_that_chains_are_drafted(caplog: pytest.LogCaptureFixture) -> None:
    logging.get_logger("transformers_gumiho.generation.loop").warning_once.cache_clear()
    target = make_chain_target("gpt_neo")
    drafter = make_chain_drafter(target)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            target.generate(**make_prompts([5]), max_new_tokens=4, assistant_model=drafter)
    assert caplog.text.count("GPTNeoForCausalLM masks its attention by cache slot") == 1
    assert caplog.text.count("Falling back to chain drafts (`branching_factor=1`)") == 1
    # What is refused verifies nothing.
    refused = make_chain_target("jamba")
    with caplog.at_level("WARNING"), pytest.raises(ValueError, match="cannot verify drafts"):
        refused.generate(**make_prompts([5]), max_new_tokens=4, assistant_model=make_chain_drafter(refused))
    assert caplog.text.count("Falling back to chain drafts (`branching_factor=1`)") == 1
