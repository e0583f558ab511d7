"""Token ids of a text to continue, also from tokenizers that add tokens to the end of every text."""

from transformers import PreTrainedTokenizerBase


def encode_open_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the token ids of a text, without those that the tokenizer adds to every end (`</s>`, `[SEP]`)."""
    ids = list(tokenizer(text)["input_ids"])
    return ids[: len(ids) - count_closing_tokens(tokenizer)]


def count_closing_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns how many tokens the tokenizer adds to the end of every text."""
    is_added = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return next((index for index, added in enumerate(reversed(is_added)) if not added), 0)
