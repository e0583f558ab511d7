"""How a target distributes texts, and whether samples are distributed so."""

import torch
from scipy.stats import chisquare
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper


def exact_probabilities(
    target: PreTrainedModel, prompt: torch.Tensor, num_tokens: int, temperature: float, top_p: float
) -> torch.Tensor:
    """Returns the probabilities `(V ** num_tokens,)` of all continuations of a prompt `(1, T)`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)])
    paths = torch.cartesian_prod(*[torch.arange(target.config.vocab_size)] * num_tokens)
    ids = torch.cat((prompt.expand(len(paths), -1), paths), dim=1)
    with torch.no_grad():
        logits = target(ids).logits[:, prompt.shape[1] - 1 : -1]
    probs = torch.stack([warpers(ids, step.clone()).softmax(dim=-1) for step in logits.unbind(1)], dim=1)
    return probs.gather(2, paths[:, :, None]).squeeze(2).prod(dim=1)


def p_value(texts: torch.Tensor, expected: torch.Tensor) -> float:
    """
    Returns that of a chi-square test of continuations `(n, num_tokens)`.

    Raises:
        AssertionError: One of them cannot be.
    """
    num_tokens = texts.shape[1]
    vocab_size = round(len(expected) ** (1 / num_tokens))
    places = vocab_size ** torch.arange(num_tokens - 1, -1, -1)
    counts = torch.bincount((texts * places).sum(dim=1), minlength=len(expected))
    assert counts[expected == 0].sum() == 0, "a token outside the nucleus was drawn"
    # Cells with too few expected samples for the chi-square approximation are taken together.
    large = expected * len(texts) >= 5
    observed = torch.cat((counts[large], counts[~large].sum()[None])).double()
    wanted = torch.cat((expected[large], expected[~large].sum()[None])).double() * len(texts)
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    wanted *= observed.sum() / wanted.sum()
    return float(chisquare(observed.numpy(), wanted.numpy()).pvalue)
