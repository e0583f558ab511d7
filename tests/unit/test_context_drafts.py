"""Drafts from the context: the newest place of what was written last, how it went on, and how far that is trusted."""

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation import StoppingCriteriaList

from transformers_gumiho.generation.drafting.context_drafts import (
    LONGEST_MATCH,
    LONGEST_NGRAM,
    ContextDrafts,
    MatchEstimates,
    NgramIndex,
    RowDrafts,
)
from transformers_gumiho.generation.sequences import CommittedSequences
from transformers_gumiho.generation.tree.walk import Path


CPU = torch.device("cpu")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4), st.integers(1, 9))
def test_match_is_that_of_a_search_through_the_text(text: list[int], max_size: int, num_tokens: int) -> None:
    index, half = NgramIndex(max_size), len(text) // 2
    index.extend(text[:half])
    index.extend(text[half:])
    places = [
        (size, end)
        for size in range(1, max_size + 1)
        for end in range(size, len(text))
        if text[end - size : end] == text[len(text) - size :]
    ]
    match = index.match()
    if not places:
        assert match is None
        return
    start = max(places)[1]
    length = 0
    while length < min(start, LONGEST_MATCH) and text[start - 1 - length] == text[-1 - length]:
        length += 1
    assert match == (start, length)
    grown = list(text)
    for _ in range(num_tokens):
        grown.append(grown[start + len(grown) - len(text)])
    assert index.continuation(start, num_tokens) == grown[len(text) :]


def test_estimates_follow_what_was_counted() -> None:
    estimates = MatchEstimates()
    before = [estimates.probability(length) for length in range(1, 60)]
    assert all(0 < a <= b < 1 for a, b in itertools.pairwise(before)), "longer matches are trusted more"
    for _ in range(40):
        estimates.count(2, is_hit=False)
        estimates.count(20, is_hit=True)
    assert estimates.probability(2) < 0.05
    assert 0.97 < estimates.probability(20) < 1
    assert estimates.probability(1) == before[0]
    for _ in range(40):
        estimates.count(2, is_hit=True)
    assert estimates.probability(2) > 0.6, "what a text does may change"


def test_drafts_are_counted_by_what_was_committed() -> None:
    row, plain = RowDrafts(4, 2), MatchEstimates()
    row.extend([5, 6, 7, 8, 9, 5, 6])
    assert row.draft()[0] == [7, 8, 9, 5]
    # The third token is another one; of the fourth nothing is known.
    row.extend([7, 8, 1])
    counted = row.estimates
    assert counted.probability(2) > plain.probability(2), "7"
    expected = MatchEstimates()
    expected.count(3, is_hit=True)
    expected.count(4, is_hit=False)
    assert counted.probability(3) == counted.probability(4) == expected.probability(4), "8, and 1 in place of 9"
    assert row.draft() == ([], [])
    row.extend([2, 3])
    assert counted.probability(3) == expected.probability(4), "nothing was drafted"


def test_rows_have_texts_of_their_own_without_padding_and_images() -> None:
    texts = [[0, 0, 1, 2, 3, 1], [4, 99, 5, 6, -7, 4], [1, 2, 3, 4, 5, 6]]

    def read(starts: list[int]) -> list[list[int]]:
        return [text[start:] for text, start in zip(texts, starts, strict=True)]

    drafts = ContextDrafts(read, [2, 0, 0], num_tokens=3, max_ngram_size=2, vocab_size=50)
    tokens, scores = drafts.draft(CPU)
    assert tokens[:2].tolist() == [[2, 3, 1], [5, 6, 4]]
    assert (scores[2] == -math.inf).all()
    plain = MatchEstimates()
    expected = [plain.probability(length) for length in (1, 2, 3)]
    torch.testing.assert_close(scores[0].exp(), torch.tensor(expected).cumprod(dim=0))
    texts[0] += [2, 9]
    texts[2] += [1, 2]
    tokens, scores = drafts.draft(CPU)
    assert drafts.num_right == [1, 0, 0], "2, and 9 in place of 3"
    assert (scores[0] == -math.inf).all()
    assert tokens[2].tolist() == [3, 4, 5]


def test_a_context_that_misleads_is_left_alone_after_a_while() -> None:
    text = [1]
    drafts = ContextDrafts(lambda starts: [text[starts[0] :]], [0], num_tokens=3, max_ngram_size=2, vocab_size=500)
    drafted = []
    # The same token again and again, and after it each time another one.
    for follower in range(2, 60):
        drafted.append(drafts.draft(CPU) is not None)
        text += [follower, 1]
    assert drafted[1:4] == [True] * 3
    assert not any(drafted[-20:])


def test_index_grows_with_the_text_and_not_with_the_setting() -> None:
    text = torch.randint(0, 250, (1000,), generator=torch.Generator().manual_seed(0)).tolist()

    def grown(max_size: int, num_tokens: int) -> NgramIndex:
        index = NgramIndex(max_size)
        index.extend(text[: num_tokens // 2])
        index.extend(text[num_tokens // 2 : num_tokens])
        return index

    longest = grown(100, 1000)
    num_bytes = len(pickle.dumps(longest))
    assert num_bytes == len(pickle.dumps(grown(LONGEST_NGRAM, 1000)))
    assert num_bytes < 2.2 * len(pickle.dumps(grown(100, 500)))
    longest.extend(text[500:520])
    assert longest.match() == (520, 20), "what is found is still compared further back"


def test_committed_tokens_are_not_read_again(calls_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = torch.arange(3000).view(3, 1000)
    monkeypatch.setattr("transformers_gumiho.generation.sequences.pad_token_id", lambda generation_config: 0)
    sequences = CommittedSequences(prompt, StoppingCriteriaList(), GenerationConfig(max_length=5000))
    read = calls_of(torch.Tensor, "tolist")
    known = [0, 10, 0]
    assert sequences.tokens_from(known) == [list(range(1000)), list(range(1010, 2000)), list(range(2000, 3000))]
    known = [1000] * 3
    # The first row has ended, the others advance at speeds of their own.
    for cycle in range(60):
        new = [[], [cycle] * 5, [cycle, -cycle]]
        tokens = torch.tensor([[0] * 5, new[1], new[2] + [0] * 3])
        sequences.commit(Path(tokens, tokens, new))
        read.clear()
        assert sequences.tokens_from(known) == new
        assert not read
        known = list(sequences.lengths)
    assert sequences.tokens_from(known) == [[], [], []]
