"""Sampling with a Gumiho assistant has exactly the target's distribution, at every batch size."""

import pytest
import torch
from distributions import exact_probabilities, p_value
from targets import make_drafter, make_prompts, make_target


VOCAB_SIZE, NUM_TOKENS = 4, 4


# Each size of a batch with both sizes of trees, and with and without a nucleus. What these change (which nodes there
# are, and which scores are -inf) does not meet in one place of the code, so that their pairs say nothing more.
@pytest.mark.parametrize(
    # From the nucleus alone, fewer continuations tell a wrong distribution from the right one.
    ("batch_size", "top_p", "num_samples", "num_assistant_tokens"),
    [(1, 1.0, 500, 40), (1, 0.8, 1000, 6), (96, 1.0, 4800, 6), (96, 0.8, 4800, 40)],
)
def test_samples_have_the_exact_distribution(
    batch_size: int, top_p: float, num_samples: int, num_assistant_tokens: int
) -> None:
    # One layer: each sample of one row is a call of its own.
    target = make_target(vocab_size=VOCAB_SIZE, num_layers=1)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)  # a flatter distribution, so that many continuations count
    drafter = make_drafter(target, num_assistant_tokens=num_assistant_tokens)
    prompt = make_prompts([5])["input_ids"] % VOCAB_SIZE
    torch.manual_seed(0)
    texts, lengths = [], []
    for _ in range(num_samples // batch_size):
        output = target.generate(
            prompt.expand(batch_size, -1), attention_mask=torch.ones(batch_size, 5), max_new_tokens=NUM_TOKENS,
            do_sample=True, temperature=0.7, top_p=top_p, top_k=0, assistant_model=drafter,
            return_dict_in_generate=True,
        )  # fmt: skip
        lengths += output.accepted_lengths[0]
        texts.append(output.sequences[:, 5:])
    assert max(lengths) > 1, "the distribution says something only where drafts are accepted"
    assert p_value(torch.cat(texts), exact_probabilities(target, prompt, NUM_TOKENS, 0.7, top_p)) > 1e-3
