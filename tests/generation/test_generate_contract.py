"""What `generate()` promises holds with a Gumiho assistant: where it ends, what it returns, what it streams."""

import copy
import gc
import time
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from targets import VOCAB_SIZE, WINDOW, equals_plain, make_drafter, make_prompts, make_target
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from transformers_gumiho import GumihoGenerateOutput, GumihoModel
from transformers_gumiho.generation.verification.tree_cache import TreeCache
from transformers_gumiho.internals import CACHE_NAME, num_hooks


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama")


@pytest.fixture(scope="module")
def drafter(target: PreTrainedModel) -> GumihoModel:
    return make_drafter(target, num_assistant_tokens=47)


def both(target: PreTrainedModel, drafter: GumihoModel, seed: int = 0, **kwargs: Any) -> tuple[Any, Any]:
    """Returns what plain and drafted generation give for the same arguments and seed."""
    kwargs = {**make_prompts([5]), "max_new_tokens": 40, "do_sample": False} | kwargs
    outputs = []
    for assistant in ({}, {"assistant_model": drafter}):
        torch.manual_seed(seed)
        outputs.append(target.generate(**copy.deepcopy(kwargs), **assistant))
    return outputs[0], outputs[1]


class RepeatsLastToken(LogitsProcessor):
    """Depends on the order of calls and on the whole prefix: favors the token two back, and counts its calls."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.prefixes.append(input_ids[0].tolist())
        scores[:, input_ids[0, -2]] += 1.0 + 0.1 * (int(input_ids.sum()) % 7)
        return scores


SAMPLING = [
    {}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1},
    {"repetition_penalty": 1.3}, {"bad_words_ids": [[3], [1, 2]], "temperature": 0.9}, {"no_repeat_ngram_size": 3},
    {"typical_p": 0.9, "suppress_tokens": [2]},
]  # fmt: skip


@pytest.mark.parametrize("settings", SAMPLING, ids=lambda settings: "-".join(settings) or "plain")
@pytest.mark.parametrize(("family", "rows"), [("llama", [5]), ("gemma3", [5, 2, 4])], ids=["one", "batch"])
def test_same_seed_samples_the_same_text(rows: list[int], family: str, settings: dict[str, Any]) -> None:
    model = make_target(family)
    draft = make_drafter(model, num_assistant_tokens=47)
    lengths = []
    for seed in range(2):
        drafted = equals_plain(model, draft, seed, **make_prompts(rows), do_sample=True, **settings)
        lengths += drafted.accepted_lengths[0]
    assert max(lengths) >= 2, "the equality says something only where drafts are accepted"


@pytest.mark.parametrize("rows", [[5], [5, 2, 4]], ids=["one", "batch"])
def test_sampling_leaves_the_random_stream_where_plain_generation_leaves_it(
    rows: list[int], target: PreTrainedModel, drafter: GumihoModel
) -> None:
    states = []
    for assistant in ({}, {"assistant_model": drafter}):
        torch.manual_seed(0)
        target.generate(**make_prompts(rows), max_new_tokens=33, do_sample=True, eos_token_id=2, **assistant)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[1], [2, 3]]},
        {"suppress_tokens": [0, 1]}, {"min_new_tokens": 12, "eos_token_id": [1, 2, 3]}, {"forced_eos_token_id": 4},
        {"sequence_bias": {(1, 2): 5.0}}, {"guidance_scale": 1.5},
        {"renormalize_logits": True, "remove_invalid_values": True},
    ],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_greedy_with_processors_equals_plain(
    target: PreTrainedModel, drafter: GumihoModel, settings: dict[str, Any], lengths: list[int]
) -> None:
    assert torch.equal(*both(target, drafter, **make_prompts(lengths), **settings))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("eos_token_id", [None, 3])
@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_custom_processor_sees_the_true_prefix_of_every_token_once(
    target: PreTrainedModel, drafter: GumihoModel, lengths: list[int], do_sample: bool, eos_token_id: int | None
) -> None:
    """With a processor of unknown kind a batch is processed as plain decoding does; so the seed's text is the same."""
    processor, settings = RepeatsLastToken(), {"do_sample": do_sample, "eos_token_id": eos_token_id}
    equals_plain(target, drafter, **make_prompts(lengths), logits_processor=[processor], **settings)
    half = len(processor.prefixes) // 2
    assert processor.prefixes[:half] == processor.prefixes[half:]


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"repetition_penalty": 1.3}], ids=str)
def test_prompts_in_fewer_bits(target: PreTrainedModel, drafter: GumihoModel, settings: dict[str, Any]) -> None:
    prompts = {name: tensor.int() for name, tensor in make_prompts([5]).items()}
    if "repetition_penalty" in settings:
        try:
            torch.zeros(1, 9).gather(1, prompts["input_ids"])
        except RuntimeError:
            pytest.skip("plain decoding fails, too: this PyTorch gathers by int64 only")
    assert torch.equal(*both(target, drafter, **prompts, **settings))


@pytest.mark.parametrize("num_more", [-1, 2])
def test_processor_that_changes_the_number_of_scores(
    target: PreTrainedModel, drafter: GumihoModel, num_more: int
) -> None:
    class Resizes(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            return torch.nn.functional.pad(scores, (0, num_more), value=-torch.inf)

    processors = LogitsProcessorList([Resizes()])
    assert torch.equal(*both(target, drafter, **make_prompts([5]), do_sample=True, logits_processor=processors))


def test_logits_are_those_of_the_target_whatever_a_processor_writes(
    target: PreTrainedModel, drafter: GumihoModel
) -> None:
    output = target.generate(
        **make_prompts([5]), max_new_tokens=20, do_sample=False, assistant_model=drafter, output_logits=True,
        return_dict_in_generate=True, logits_processor=LogitsProcessorList([RepeatsLastToken()]),
    )  # fmt: skip
    expected = target(output.sequences).logits[0, 4:-1].float()
    torch.testing.assert_close(torch.cat(output.logits), expected)


@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
@pytest.mark.parametrize("max_length", [3, 5, 12, 60])
def test_length_criterion_of_the_caller(
    target: PreTrainedModel, drafter: GumihoModel, max_length: int, lengths: list[int]
) -> None:
    """Also of a prompt that is as long already: criteria are asked after a token."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    output = equals_plain(target, drafter, **make_prompts(lengths), stopping_criteria=criteria)
    assert output.sequences.shape[1] == max(max_length, 6)


@pytest.mark.parametrize("eos_token_id", [[token] for token in range(VOCAB_SIZE)] + [[1, 5], list(range(8))])
def test_ends_at_the_token_where_plain_generation_ends(
    target: PreTrainedModel, drafter: GumihoModel, eos_token_id: list[int]
) -> None:
    assert torch.equal(*both(target, drafter, eos_token_id=eos_token_id))
    batch = make_prompts([3, 9, 1, 6])
    assert torch.equal(*both(target, drafter, eos_token_id=eos_token_id, **batch))


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_max_new_tokens_and_max_length(target: PreTrainedModel, drafter: GumihoModel, max_new_tokens: int) -> None:
    plain, drafted = both(target, drafter, max_new_tokens=max_new_tokens)
    assert drafted.shape[1] == 5 + max_new_tokens
    assert torch.equal(plain, drafted)
    assert torch.equal(*both(target, drafter, max_new_tokens=None, max_length=5 + max_new_tokens))


class StopsAfterPattern(StoppingCriteria):
    """Ends a row whose newest tokens sum to a multiple of `divisor` once it has `minimum` tokens."""

    def __init__(self, minimum: int, divisor: int):
        self.minimum, self.divisor, self.lengths = minimum, divisor, []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.lengths.append(input_ids.shape[1])
        return (input_ids.sum(dim=1) % self.divisor == 0) & (input_ids.shape[1] >= self.minimum)


@pytest.mark.parametrize("minimum", [6, 7, 8, 11, 20])
@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_custom_criterion_ends_in_the_middle_of_an_accepted_path(
    target: PreTrainedModel, drafter: GumihoModel, minimum: int, lengths: list[int]
) -> None:
    criteria = StoppingCriteriaList([StopsAfterPattern(minimum, 3)])
    prompts = make_prompts(lengths)
    for eos_token_id in (None, 7):
        assert torch.equal(*both(target, drafter, stopping_criteria=criteria, eos_token_id=eos_token_id, **prompts))


def test_custom_criterion_is_called_once_for_each_length(target: PreTrainedModel, drafter: GumihoModel) -> None:
    criterion = StopsAfterPattern(30, 1)
    target.generate(**make_prompts([5]), max_new_tokens=40, assistant_model=drafter, stopping_criteria=[criterion])
    assert criterion.lengths == list(range(6, 31))


def test_max_time_ends_generation(target: PreTrainedModel, drafter: GumihoModel) -> None:
    start = time.time()
    output = target.generate(**make_prompts([5]), max_new_tokens=100_000, max_time=0.3, assistant_model=drafter)
    assert time.time() - start < 5
    assert 5 < output.shape[1] < 100_000


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("eos_token_id", [None, 1, 3, 5])
@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_streamer_gets_what_plain_generation_gives_it(
    target: PreTrainedModel, drafter: GumihoModel, eos_token_id: int | None, lengths: list[int]
) -> None:
    records = [Recorder(), Recorder()]
    settings = make_prompts(lengths) | {"max_new_tokens": 30, "do_sample": False, "eos_token_id": eos_token_id}
    for streamer, assistant in zip(records, ({}, {"assistant_model": drafter}), strict=True):
        target.generate(**settings, streamer=streamer, **assistant)
    assert records[0].values == records[1].values
    assert records[1].ended == 1


RETURNS = {f"output_{name}": True for name in ("scores", "logits", "hidden_states")} | {
    "return_dict_in_generate": True
}


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2}, {"do_sample": True, "top_k": 4}])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_returned_values_equal_plain_ones(family: str, settings: dict[str, Any]) -> None:
    model = make_target(family)
    plain, drafted = both(model, make_drafter(model, num_assistant_tokens=47), **RETURNS, **settings)
    assert isinstance(drafted, GumihoGenerateOutput)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert sum(drafted.accepted_lengths[0]) == 40 - 1
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(drafted, name), getattr(plain, name), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(drafted.hidden_states, plain.hidden_states)
    assert type(drafted[CACHE_NAME]) is DynamicCache
    assert drafted[CACHE_NAME].get_seq_length() == plain[CACHE_NAME].get_seq_length()
    for ours, theirs in zip(drafted[CACHE_NAME].layers, plain[CACHE_NAME].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


def test_ended_rows_of_a_batch(target: PreTrainedModel, drafter: GumihoModel) -> None:
    """Values of a row equal plain ones up to its end and are zero after it; its cycles commit what is returned."""
    plain, drafted = both(target, drafter, **make_prompts([3, 8, 5]), **RETURNS, eos_token_id=3)
    assert torch.equal(plain.sequences, drafted.sequences)
    ends = [
        next((step + 1 for step, token in enumerate(row) if token == 3), len(row))
        for row in plain.sequences[:, 8:].tolist()
    ]
    assert len(set(ends)) > 1
    for row, end in enumerate(ends):
        assert sum(drafted.accepted_lengths[row]) == end - 1
        for step, (ours, theirs) in enumerate(zip(drafted.logits, plain.logits, strict=True)):
            expected = theirs[row] if step < end else torch.zeros_like(theirs[row])
            torch.testing.assert_close(ours[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("minimum", [6, 9, 11])
def test_cycles_commit_what_is_returned_where_rows_end_together(
    target: PreTrainedModel, drafter: GumihoModel, minimum: int
) -> None:
    criteria = [StopsAfterPattern(minimum, 1)]
    output = equals_plain(target, drafter, **make_prompts([5, 2, 4]), stopping_criteria=criteria)
    assert output.sequences.shape[1] == minimum
    assert output[CACHE_NAME].get_seq_length() == minimum - 1
    for lengths in output.accepted_lengths:
        assert sum(lengths) == minimum - 5 - 1
        assert all(length > 0 for length in lengths)


def test_batch_returns_values_for_every_step_of_the_longest_row(target: PreTrainedModel, drafter: GumihoModel) -> None:
    plain, drafted = both(target, drafter, **make_prompts([3, 8, 5]), **RETURNS)
    assert torch.equal(plain.sequences, drafted.sequences)
    for name in ("scores", "logits", "hidden_states"):
        torch.testing.assert_close(getattr(drafted, name), getattr(plain, name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "opt"])
@pytest.mark.parametrize("first_is_drafted", [True, False])
def test_following_call_continues_from_the_returned_cache(family: str, first_is_drafted: bool) -> None:
    model = make_target(family)
    draft = make_drafter(model, num_assistant_tokens=47)
    prompt = make_prompts([WINDOW + 3])
    whole = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    first = {"assistant_model": draft} if first_is_drafted else {}
    cache = DynamicCache(config=model.config)
    begun = model.generate(**prompt, max_new_tokens=15, do_sample=False, **{CACHE_NAME: cache}, **first)
    assert cache.get_seq_length() == begun.shape[1] - 1
    for assistant in ({"assistant_model": draft}, {}):
        continued = model.generate(
            begun, max_new_tokens=25, do_sample=False, **{CACHE_NAME: copy.deepcopy(cache)}, **assistant
        )
        assert torch.equal(continued, whole)


def test_num_return_sequences(target: PreTrainedModel, drafter: GumihoModel) -> None:
    # At a temperature close to zero every returned sequence is the greedy one.
    greedy = target.generate(**make_prompts([5, 3]), max_new_tokens=40, do_sample=False)
    settings = {**make_prompts([5, 3]), "num_return_sequences": 3, "do_sample": True}
    _, drafted = both(target, drafter, **settings, temperature=1e-6)
    assert torch.equal(drafted, greedy.repeat_interleave(3, dim=0))
    plain, drafted = both(target, drafter, **settings)
    assert torch.equal(plain, drafted)
    assert len({tuple(row.tolist()) for row in drafted}) > 2


def test_user_given_positions_and_mask(target: PreTrainedModel, drafter: GumihoModel) -> None:
    prompt = make_prompts([9])
    prompt["attention_mask"][0, 3:5] = 0
    prompt["position_ids"] = torch.tensor([[0, 1, 2, 7, 8, 20, 21, 22, 23]])
    plain, drafted = both(target, drafter, **prompt)
    assert torch.equal(plain, drafted)
    assert not torch.equal(plain, target.generate(prompt["input_ids"], max_new_tokens=40, do_sample=False))


def test_inputs_embeds(target: PreTrainedModel, drafter: GumihoModel) -> None:
    embeds = target.get_input_embeddings()(make_prompts([9])["input_ids"])
    equals_plain(target, drafter, inputs_embeds=embeds)


def test_chunked_prefill_and_inference_mode(target: PreTrainedModel, drafter: GumihoModel) -> None:
    with torch.inference_mode():
        assert torch.equal(*both(target, drafter, **make_prompts([21]), prefill_chunk_size=8))


def test_learned_positions_up_to_the_last_one() -> None:
    model = make_target("gpt2")
    equals_plain(model, make_drafter(model), **make_prompts([20]), max_new_tokens=96 - 20)


def test_learned_positions_that_end_before_the_longest_text_would() -> None:
    model = make_target("gpt2")
    settings = {"max_new_tokens": 200, "stopping_criteria": [StopsAfterPattern(94, 1)]}
    assert equals_plain(model, make_drafter(model), **make_prompts([20]), **settings).sequences.shape[1] == 94


def test_overflow_in_the_drafter_costs_speed_and_nothing_else(target: PreTrainedModel) -> None:
    for name in ("mlp.2.1.linear.weight", "layers.1.mlp.up_proj.weight"):
        draft = make_drafter(target)
        draft.get_parameter(name).data[0, 0] = torch.nan
        assert torch.equal(*both(target, draft))


def test_generation_leaves_no_cache_behind(target: PreTrainedModel, drafter: GumihoModel) -> None:
    gc.collect()
    gc.disable()
    try:
        target.generate(**make_prompts([5]), max_new_tokens=20, assistant_model=drafter)
        assert not [item for item in gc.get_objects() if type(item) is TreeCache]
    finally:
        gc.enable()


@pytest.mark.parametrize("lengths", [[6], [6, 3]])
def test_bfloat16_commits_only_tokens_the_target_chose(lengths: list[int]) -> None:
    model = make_target("llama").to(torch.bfloat16)
    draft = make_drafter(model, num_assistant_tokens=31)
    prompts = make_prompts(lengths)
    output = model.generate(
        **prompts, max_new_tokens=32, do_sample=False, assistant_model=draft, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    # In bf16 two orders of summation may break a near-tie differently, but each token is the arg-max of its logits.
    assert torch.equal(torch.stack(output.logits, dim=1).argmax(dim=-1), output.sequences[:, -32:])
    forced = model(
        output.sequences, attention_mask=torch.cat((prompts["attention_mask"], torch.ones(len(lengths), 32)), 1)
    )
    logits = forced.logits[:, -33:-1].float()
    chosen = logits.gather(2, output.sequences[:, -32:, None]).squeeze(2)
    assert (logits.amax(dim=2) - chosen).max() < 0.25


def test_settings_are_read_at_every_call(target: PreTrainedModel) -> None:
    draft, longest = make_drafter(target), {}
    for depth in (1, 3, 7):
        draft.generation_config.tree_depth = depth
        longest[depth] = max(equals_plain(target, draft, max_new_tokens=60).accepted_lengths[0])
    assert longest[1] == 2
    assert longest[3] <= 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("target_device", "drafter_device"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
@pytest.mark.parametrize("draft_vocabulary", [None, [6, 1, 5, 2]], ids=["all", "some"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_drafter_on_another_device(
    do_sample: bool, target_device: str, drafter_device: str, lengths: list[int], draft_vocabulary: list[int] | None
) -> None:
    model = make_target("llama").to(target_device)
    draft = make_drafter(model, num_assistant_tokens=47, draft_vocabulary=draft_vocabulary).to(drafter_device)
    prompts = {name: value.to(target_device) for name, value in make_prompts(lengths).items()}
    assert torch.equal(*both(model, draft, **prompts, do_sample=do_sample))


def test_offloaded_target(drafter: GumihoModel) -> None:
    model = make_target("llama")
    plain = model.generate(**make_prompts([5]), max_new_tokens=40, do_sample=False)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    assert torch.equal(equals_plain(model, drafter).sequences, plain)


def test_cache_of_a_batch_after_an_exception_is_a_prefix_of_every_row(
    target: PreTrainedModel, drafter: GumihoModel
) -> None:
    prompts = make_prompts([5, 2, 4])
    plain = target.generate(**prompts, max_new_tokens=40, do_sample=False)
    cache = DynamicCache(config=target.config)
    arguments = {"assistant_model": drafter, "streamer": StopsTheStream(), CACHE_NAME: cache}
    with pytest.raises(RuntimeError, match="stop here"):
        target.generate(**prompts, max_new_tokens=40, **arguments)
    length = cache.get_seq_length()
    assert 5 < length < 45
    mask = torch.cat((prompts["attention_mask"], torch.ones(3, length + 1 - 5, dtype=torch.long)), dim=1)
    continued = target.generate(
        plain[:, : length + 1], attention_mask=mask, max_length=45, do_sample=False, **{CACHE_NAME: cache}
    )
    assert torch.equal(continued, plain)


class StopsTheStream(BaseStreamer):
    def __init__(self) -> None:
        self.calls = 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 12:
            raise RuntimeError("stop here")

    def end(self) -> None:
        pass


class Interrupts(StoppingCriteria):
    def __init__(self, error: type[BaseException]):
        self.error, self.calls = error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.BoolTensor:
        self.calls += 1
        if self.calls == 9:
            raise self.error("stop here")
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exception_leaves_the_target_as_it_was(
    target: PreTrainedModel, drafter: GumihoModel, error: type[BaseException]
) -> None:
    config, settings = target.config.to_dict(), target.generation_config.to_dict()
    hooks = [num_hooks(module) for module in target.modules()]
    plain = target.generate(**make_prompts([5]), max_new_tokens=40, do_sample=False)
    cache = DynamicCache(config=target.config)
    with pytest.raises(error, match="stop here"):
        target.generate(
            **make_prompts([5]), max_new_tokens=40, assistant_model=drafter, stopping_criteria=[Interrupts(error)],
            **{CACHE_NAME: cache},
        )  # fmt: skip
    assert [num_hooks(module) for module in target.modules()] == hooks
    assert target.config.to_dict() == config
    assert target.generation_config.to_dict() == settings
    assert torch.equal(target.generate(**make_prompts([5]), max_new_tokens=40, do_sample=False), plain)
    # A cache of the caller's still holds a committed prefix of the text.
    length = cache.get_seq_length()
    assert 5 <= length < 45
    continued = target.generate(
        plain[:, : length + 1], max_length=45, do_sample=False, **{CACHE_NAME: cache}, assistant_model=drafter
    )
    assert torch.equal(continued, plain)
