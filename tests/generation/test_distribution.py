"""Sampling with a Gumiho assistant has exactly the target's distribution, at every batch size."""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from targets import make_drafter, make_prompts, make_target
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper


VOCAB_SIZE, NUM_TOKENS = 4, 4


def exact_probabilities(target: PreTrainedModel, prompt: torch.Tensor, warpers: LogitsProcessorList) -> torch.Tensor:
    """Returns the probability of each of the `VOCAB_SIZE ** NUM_TOKENS` continuations."""
    paths = torch.tensor(list(itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS)))
    ids = torch.cat((prompt.expand(len(paths), -1), paths), dim=1)
    with torch.no_grad():
        logits = target(ids).logits[:, prompt.shape[1] - 1 : -1]
    probs = torch.stack([warpers(ids, step.clone()).softmax(dim=-1) for step in logits.unbind(1)], dim=1)
    return probs.gather(2, paths[:, :, None]).squeeze(2).prod(dim=1)


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
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(top_p)])
    expected = exact_probabilities(target, prompt, warpers)
    counts = torch.zeros(VOCAB_SIZE**NUM_TOKENS)
    torch.manual_seed(0)
    lengths = []
    for _ in range(num_samples // batch_size):
        output = target.generate(
            prompt.expand(batch_size, -1), attention_mask=torch.ones(batch_size, 5), max_new_tokens=NUM_TOKENS,
            do_sample=True, temperature=0.7, top_p=top_p, top_k=0, assistant_model=drafter,
            return_dict_in_generate=True,
        )  # fmt: skip
        lengths += output.accepted_lengths[0]
        places = VOCAB_SIZE ** torch.arange(NUM_TOKENS - 1, -1, -1)
        index = (output.sequences[:, 5:] * places).sum(dim=1)
        counts += torch.bincount(index, minlength=counts.numel())
    assert max(lengths) > 1, "the distribution says something only where drafts are accepted"
    assert counts[expected == 0].sum() == 0, "a token outside the nucleus was drawn"
    # Cells with too few expected samples for the chi-square approximation are taken together.
    large = expected * num_samples >= 5
    observed = torch.cat((counts[large], counts[~large].sum()[None])).double()
    wanted = torch.cat((expected[large], expected[~large].sum()[None])).double() * num_samples
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    wanted *= observed.sum() / wanted.sum()
    assert chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-3
