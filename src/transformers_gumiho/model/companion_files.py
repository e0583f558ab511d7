"""The files next to the weights of a saved drafter: the target's tokenizer, and code for `custom_generate`."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..user_errors import UserValueError
from .configuration_gumiho import GumihoConfig
from .pushing import Push


_EMBEDDING = "embed_tokens.weight"

# What `generate(custom_generate=<repository>)` reads: the code, and the packages that it needs.
CUSTOM_GENERATE = {
    "generate.py": (
        '"""Decodes with the drafter of this repository: `target.generate(..., custom_generate=<repository>)`."""\n\n'
        "from transformers_gumiho.custom_generation import generate\n\n\n"
        '__all__ = ["generate"]\n'
    ),
    "requirements.txt": "transformers-gumiho\n",
}


class SavingMixin:
    """
    Saves a drafter with the files that a server of texts needs besides the drafter itself; for `PreTrainedModel`s.

    Attributes:
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, saved for pipelines that load the drafter.
    """

    config: GumihoConfig
    tokenizer: PreTrainedTokenizerBase | None = None

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        *args: Any,
        save_embedding: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """
        As `PreTrainedModel.save_pretrained`; also writes the tokenizer and the folder `custom_generate`.

        Args:
            save_embedding (`bool`, *optional*): Whether the token embedding is saved; by default, where the drafter
                has one of its own. What is loaded from files without it reads the embedding of its target.
            *args, **kwargs: As in `PreTrainedModel.save_pretrained`.

        Raises:
            ValueError: The embedding is to be saved and the drafter has none, also not its target's; or a distributed
                checkpoint is to be pushed.
        """
        if push_to_hub and kwargs.get("distributed_checkpoint"):
            raise UserValueError(
                "A distributed checkpoint is not what a Gumiho drafter is loaded from. Push with "
                "`distributed_checkpoint=False`, which gathers the weights."
            )
        # transformers logs why it does not save into a file.
        saves = self.should_save_on_this_rank(is_main_process) and not Path(save_directory).is_file()  # type: ignore[attr-defined]
        with self._as_saved(save_embedding, state_dict) as tensors:
            push = Push(save_directory, **_push_arguments(kwargs)) if push_to_hub and saves else None
            super().save_pretrained(save_directory, is_main_process, tensors, False, *args, **kwargs)  # type: ignore[misc]
        if saves:
            companions = self._save_companions(Path(save_directory))
            if push is not None:
                push.commit(self.model_tags, companions)  # type: ignore[attr-defined]

    @contextmanager
    def _as_saved(
        self, save_embedding: bool | None, state_dict: dict[str, torch.Tensor] | None
    ) -> Iterator[dict[str, torch.Tensor] | None]:
        """Makes the config say for as long as it lasts what the files will hold; yields the tensors to save."""
        had_embedding = self.config.has_embedding
        if save_embedding is None or save_embedding == had_embedding:
            yield state_dict
            return
        tensors = dict(state_dict or self.state_dict())  # type: ignore[attr-defined]
        if save_embedding:
            if self.embed_tokens.weight is None:  # type: ignore[attr-defined]
                raise UserValueError(
                    "`save_embedding=True`, but this drafter has no token embedding yet. "
                    "Call `drafter.share_embedding(target)` first."
                )
            tensors[_EMBEDDING] = self.embed_tokens.weight  # type: ignore[attr-defined]
        else:
            tensors.pop(_EMBEDDING, None)
        self.config.has_embedding = save_embedding
        try:
            yield tensors
        finally:
            self.config.has_embedding = had_embedding

    def _save_companions(self, save_directory: Path) -> set[Path]:
        """Writes the files, and returns them."""
        folder = save_directory / "custom_generate"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in CUSTOM_GENERATE.items():
            (folder / name).write_text(text, encoding="utf-8")
        written = {folder / name for name in CUSTOM_GENERATE}
        if self.tokenizer is not None:
            written |= {Path(file) for file in self.tokenizer.save_pretrained(save_directory)}
        return {file for file in written if file.is_file()}


def _push_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns those arguments of `save_pretrained` that are for the Hub alone, and the token, which is for both."""
    for_saving = set(inspect.signature(PreTrainedModel.save_pretrained).parameters) - {"token"}
    return {name: value for name, value in kwargs.items() if name not in for_saving}
