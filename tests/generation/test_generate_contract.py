"""What `generate()` promises holds with a Gumiho assistant: where it ends, what it returns, what it streams."""

import copy
import gc
import math
import time
from typing import Any

import pytest
import torch
from streamers import Recorder
from targets import VOCAB_SIZE, WINDOW, Pair, equals_plain, make_drafter, make_prompts, make_target, plain_and_drafted
from transformers import DynamicCache, EosTokenCriteria, LogitsProcessor, MaxLengthCriteria, StoppingCriteria

from transformers_gumiho import GumihoGenerateOutput
from transformers_gumiho.generation.verification.tree_cache import TreeCache
from transformers_gumiho.internals import CACHE_NAME, num_hooks


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = make_target("llama")
    return target, make_drafter(target, num_assistant_tokens=47)


class RepeatsLastToken(LogitsProcessor):
    """Depends on the order of calls and on the whole prefix: favors the token two back, and counts its calls."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.prefixes.append(input_ids[0].tolist())
        scores[:, input_ids[0, -2]] += 1.0 + 0.1 * (int(input_ids.sum()) % 7)
        return scores


# Several settings at once, and trees that are taken far; each setting alone is in test_generation_config.
SAMPLING = [
    {}, {"eos_token_id": 7}, {"temperature": 1.5, "top_k": 3, "repetition_penalty": 1.3},
    {"bad_words_ids": [[3], [1, 2]], "temperature": 0.9}, {"typical_p": 0.9, "suppress_tokens": [2]},
]  # fmt: skip


@pytest.mark.parametrize("settings", SAMPLING, ids=lambda settings: "-".join(settings) or "plain")
@pytest.mark.parametrize(("family", "rows"), [("llama", [5]), ("gemma3", [5, 2, 4])], ids=["one", "batch"])
def test_same_seed_samples_the_same_text(rows: list[int], family: str, settings: dict[str, Any]) -> None:
    model = make_target(family)
    draft = make_drafter(model, num_assistant_tokens=47)
    lengths = []
    for seed in range(2):
        drafted = equals_plain(model, draft, seed, lengths=rows, do_sample=True, **settings)
        lengths += drafted.accepted_lengths[0]
    assert max(lengths) >= 2, "the equality says something only where drafts are accepted"


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("eos_token_id", [None, 3])
@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_custom_processor_sees_the_true_prefix_of_every_token_once(
    pair: Pair, lengths: list[int], do_sample: bool, eos_token_id: int | None
) -> None:
    """With a processor of unknown kind a batch is processed as plain decoding does; so the seed's text is the same."""
    processor, settings = RepeatsLastToken(), {"do_sample": do_sample, "eos_token_id": eos_token_id}
    equals_plain(*pair, lengths=lengths, logits_processor=[processor], **settings)
    half = len(processor.prefixes) // 2
    assert processor.prefixes[:half] == processor.prefixes[half:]


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"repetition_penalty": 1.3}], ids=str)
def test_prompts_in_fewer_bits(pair: Pair, settings: dict[str, Any]) -> None:
    prompts = {name: tensor.int() for name, tensor in make_prompts([5]).items()}
    if "repetition_penalty" in settings:
        try:
            torch.zeros(1, 9).gather(1, prompts["input_ids"])
        except RuntimeError:
            pytest.skip("plain decoding fails, too: this PyTorch gathers by int64 only")
    equals_plain(*pair, **prompts, **settings)


@pytest.mark.parametrize("num_more", [-1, 2])
def test_processor_that_changes_the_number_of_scores(pair: Pair, num_more: int) -> None:
    def resize(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(scores, (0, num_more), value=-torch.inf)

    equals_plain(*pair, do_sample=True, logits_processor=[resize])


def test_logits_are_those_of_the_target_whatever_a_processor_writes(pair: Pair) -> None:
    target, drafter = pair
    output = target.generate(
        **make_prompts([5]), max_new_tokens=20, do_sample=False, assistant_model=drafter, output_logits=True,
        return_dict_in_generate=True, logits_processor=[RepeatsLastToken()],
    )  # fmt: skip
    expected = target(output.sequences).logits[0, 4:-1].float()
    torch.testing.assert_close(torch.cat(output.logits), expected)


@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
@pytest.mark.parametrize("max_length", [3, 5, 12, 12.5, 60])
def test_length_criterion_of_the_caller(pair: Pair, max_length: float, lengths: list[int]) -> None:
    """Also of a prompt that is as long already: criteria are asked after a token."""
    criteria = [MaxLengthCriteria(max_length)]
    output = equals_plain(*pair, lengths=lengths, stopping_criteria=criteria)
    assert output.sequences.shape[1] == max(math.ceil(max_length), 6)


@pytest.mark.parametrize("eos_token_id", [[token] for token in range(VOCAB_SIZE)] + [[1, 5], list(range(8))])
def test_ends_at_the_token_where_plain_generation_ends(pair: Pair, eos_token_id: list[int]) -> None:
    for lengths in ([5], [3, 9, 1, 6]):
        equals_plain(*pair, eos_token_id=eos_token_id, lengths=lengths)
    criteria = [EosTokenCriteria(torch.tensor(eos_token_id[0]))]  # of no dimension
    equals_plain(*pair, eos_token_id=eos_token_id, lengths=lengths, stopping_criteria=criteria)


# All other lengths up to 15 are in test_costs.
@pytest.mark.parametrize("max_new_tokens", [1, 2, 9, 9.5])
def test_max_new_tokens_and_max_length(pair: Pair, max_new_tokens: float) -> None:
    for settings in ({"max_new_tokens": max_new_tokens}, {"max_new_tokens": None, "max_length": 5 + max_new_tokens}):
        assert equals_plain(*pair, **settings).sequences.shape[1] == 5 + math.ceil(max_new_tokens)


class StopsAfterPattern(StoppingCriteria):
    """Ends a row whose newest tokens sum to a multiple of `divisor` once it has `minimum` tokens."""

    def __init__(self, minimum: int, divisor: int):
        self.minimum, self.divisor, self.lengths = minimum, divisor, []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.lengths.append(input_ids.shape[1])
        return (input_ids.sum(dim=1) % self.divisor == 0) & (input_ids.shape[1] >= self.minimum)


@pytest.mark.parametrize("minimum", [6, 7, 8, 11, 20])
@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_custom_criterion_ends_in_the_middle_of_an_accepted_path(pair: Pair, minimum: int, lengths: list[int]) -> None:
    """Which is asked once for each length, as in plain decoding."""
    criterion = StopsAfterPattern(minimum, 3)
    for eos_token_id in (None, 7):
        criterion.lengths.clear()
        equals_plain(*pair, lengths=lengths, stopping_criteria=[criterion], eos_token_id=eos_token_id)
        half = len(criterion.lengths) // 2
        assert criterion.lengths[:half] == criterion.lengths[half:]


def test_max_time_ends_generation(pair: Pair) -> None:
    target, drafter = pair
    start = time.time()
    output = target.generate(**make_prompts([5]), max_new_tokens=100_000, max_time=0.3, assistant_model=drafter)
    assert time.time() - start < 5
    assert 5 < output.shape[1] < 100_000


@pytest.mark.parametrize("eos_token_id", [None, 1, 3, 5])
@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_streamer_gets_what_plain_generation_gives_it(
    pair: Pair, eos_token_id: int | None, lengths: list[int]
) -> None:
    streamer = Recorder()
    equals_plain(*pair, lengths=lengths, streamer=streamer, eos_token_id=eos_token_id)
    half = len(streamer.values) // 2
    assert streamer.values[:half] == streamer.values[half:]


RETURNS = {f"output_{name}": True for name in ("scores", "logits", "hidden_states")}


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2}, {"do_sample": True, "top_k": 4}])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_returned_values_equal_plain_ones(family: str, settings: dict[str, Any]) -> None:
    model = make_target(family)
    plain, drafted = plain_and_drafted(model, make_drafter(model, num_assistant_tokens=47), **RETURNS, **settings)
    assert isinstance(drafted, GumihoGenerateOutput)
    assert sum(drafted.accepted_lengths[0]) == 40 - 1
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(drafted, name), getattr(plain, name), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(drafted.hidden_states, plain.hidden_states)
    assert type(drafted[CACHE_NAME]) is DynamicCache
    assert drafted[CACHE_NAME].get_seq_length() == plain[CACHE_NAME].get_seq_length()
    for ours, theirs in zip(drafted[CACHE_NAME].layers, plain[CACHE_NAME].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


def test_ended_rows_of_a_batch(pair: Pair) -> None:
    """Values of a row equal plain ones up to its end and are zero after it; its cycles commit what is returned."""
    plain, drafted = plain_and_drafted(*pair, lengths=[3, 8, 5], **RETURNS, eos_token_id=3)
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
def test_cycles_commit_what_is_returned_where_rows_end_together(pair: Pair, minimum: int) -> None:
    criteria = [StopsAfterPattern(minimum, 1)]
    output = equals_plain(*pair, lengths=[5, 2, 4], stopping_criteria=criteria)
    assert output.sequences.shape[1] == minimum
    assert output[CACHE_NAME].get_seq_length() == minimum - 1
    for lengths in output.accepted_lengths:
        assert sum(lengths) == minimum - 5 - 1
        assert all(length > 0 for length in lengths)


def test_batch_returns_values_for_every_step_of_the_longest_row(pair: Pair) -> None:
    plain, drafted = plain_and_drafted(*pair, lengths=[3, 8, 5], **RETURNS)
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
            begun, attention_mask=torch.ones_like(begun), max_new_tokens=25, do_sample=False,
            **{CACHE_NAME: copy.deepcopy(cache)}, **assistant,
        )  # fmt: skip
        assert torch.equal(continued, whole)


def test_num_return_sequences(pair: Pair) -> None:
    drafted = equals_plain(*pair, lengths=[5, 3], num_return_sequences=3, do_sample=True).sequences
    assert len({tuple(row.tolist()) for row in drafted}) > 2


def test_user_given_positions_and_mask(pair: Pair) -> None:
    target, drafter = pair
    prompt = make_prompts([9])
    prompt["attention_mask"][0, 3:5] = 0
    prompt["position_ids"] = torch.tensor([[0, 1, 2, 7, 8, 20, 21, 22, 23]])
    drafted = equals_plain(target, drafter, **prompt).sequences
    assert not torch.equal(drafted, target.generate(prompt["input_ids"], max_new_tokens=40, do_sample=False))


def test_inputs_embeds(pair: Pair) -> None:
    target, drafter = pair
    embeds = target.get_input_embeddings()(make_prompts([9])["input_ids"])
    equals_plain(target, drafter, inputs_embeds=embeds)


def test_learned_positions_that_end_before_the_longest_text_would() -> None:
    model = make_target("gpt2")
    settings = {"max_new_tokens": 200, "stopping_criteria": [StopsAfterPattern(94, 1)]}
    assert equals_plain(model, make_drafter(model), lengths=[20], **settings).sequences.shape[1] == 94


@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_dropout_in_the_drafter_draws_nothing(pair: Pair, lengths: list[int]) -> None:
    drafter = copy.deepcopy(pair[1]).train()
    for layer in drafter.layers:
        layer.self_attn.attention_dropout = 0.5
    equals_plain(pair[0], drafter, lengths=lengths, do_sample=True)
    assert all(module.training for module in drafter.modules())


def test_overflow_in_the_drafter_costs_speed_and_nothing_else(pair: Pair) -> None:
    target, _ = pair
    for name in ("mlp.2.1.linear.weight", "layers.1.mlp.up_proj.weight"):
        draft = make_drafter(target)
        draft.get_parameter(name).data[0, 0] = torch.nan
        equals_plain(target, draft)


def test_generation_leaves_no_cache_behind(pair: Pair) -> None:
    target, drafter = pair
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


def test_settings_are_read_at_every_call(pair: Pair) -> None:
    target, _ = pair
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
    equals_plain(model, draft, **prompts, do_sample=do_sample)


class Interrupts(Recorder):
    """Raises an error when it is given something for the twelfth time, as a streamer or as a criterion."""

    def __init__(self, error: type[BaseException]):
        super().__init__()
        self.error = error

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.values) == 12:
            raise self.error("stop here")

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.put(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("way", "error", "lengths"),
    [
        ("criterion", RuntimeError, [5]), ("criterion", KeyboardInterrupt, [5]), ("streamer", RuntimeError, [5, 2, 4]),
    ],
)  # fmt: skip
def test_exception_leaves_the_target_as_it_was(
    pair: Pair, way: str, error: type[BaseException], lengths: list[int]
) -> None:
    target, drafter = pair
    interrupts = Interrupts(error)
    given = {"streamer": interrupts} if way == "streamer" else {"stopping_criteria": [interrupts]}
    config, settings = target.config.to_dict(), target.generation_config.to_dict()
    hooks = [num_hooks(module) for module in target.modules()]
    prompts, cache = make_prompts(lengths), DynamicCache(config=target.config)
    plain = target.generate(**prompts, max_new_tokens=40, do_sample=False)
    with pytest.raises(error, match="stop here"):
        target.generate(**prompts, max_new_tokens=40, assistant_model=drafter, **{CACHE_NAME: cache}, **given)
    assert [num_hooks(module) for module in target.modules()] == hooks
    assert target.config.to_dict() == config
    assert target.generation_config.to_dict() == settings
    assert torch.equal(target.generate(**prompts, max_new_tokens=40, do_sample=False), plain)
    # A cache of the caller's still holds a committed prefix of every row.
    length = cache.get_seq_length()
    assert 5 < length < 45
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, length + 1 - 5), value=1)
    for assistant in ({"assistant_model": drafter}, {}):
        continued = target.generate(
            plain[:, : length + 1], attention_mask=mask, max_length=45, do_sample=False,
            **{CACHE_NAME: copy.deepcopy(cache)}, **assistant,
        )  # fmt: skip
        assert torch.equal(continued, plain)
