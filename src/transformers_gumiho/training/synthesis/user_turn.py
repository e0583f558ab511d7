"""Where a chat template opens a user's turn: what a target writes after it is what it takes users to say."""

from dataclasses import dataclass

import jinja2
from transformers import PreTrainedTokenizerBase

from ...user_errors import UserValueError


# What no template writes by itself.
_MARK = "9b1f6c-the-user-speaks-here-4e02"


class UserTurnNotFoundError(UserValueError):
    """A chat template under which a target cannot be asked for a user's turn."""


@dataclass(frozen=True)
class UserTurn:
    """What a chat template writes before (`opening`) and after (`closing`) what the user says in the first turn."""

    opening: str
    closing: str

    def ends(self, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        """Returns the tokens that end a user's turn: the tokenizer's end, and special ones that begin the closing."""
        ids = tokenizer(self.closing.strip(), add_special_tokens=False)["input_ids"][:1]
        special = {token for token in ids if token in tokenizer.all_special_ids}
        return special | ({tokenizer.eos_token_id} - {None})

    def cut(self, text: str) -> str:
        """Returns what was said before the closing, where the text holds it."""
        closing = self.closing.strip()
        return (text.split(closing)[0] if closing else text).strip()


def find_user_turn(tokenizer: PreTrainedTokenizerBase) -> UserTurn:
    """Finds what the tokenizer's chat template writes around a first user turn, or raises `UserTurnNotFoundError`."""
    name = tokenizer.name_or_path
    way_out = "template with a user opening (`--chat_template FILE`), or questions (`--data FILE`)."
    if not tokenizer.chat_template:
        raise UserTurnNotFoundError(f"The tokenizer {name!r} has no chat template. Give a {way_out}")
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    except jinja2.TemplateError as error:
        message = f"The chat template of {name!r} refuses a user's turn: {error}. Give another {way_out}"
        raise UserTurnNotFoundError(message) from error
    opening, *rest = text.split(_MARK)
    if len(rest) != 1 or not opening.strip():
        how = "writes nothing before it" if len(rest) == 1 else f"shows it {len(rest)} times"
        raise UserTurnNotFoundError(
            f"The chat template of {name!r} does not show where the user speaks: it {how}. Give a {way_out}"
        )
    return UserTurn(opening, rest[0])
