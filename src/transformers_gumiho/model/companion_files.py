"""The files next to a saved drafter's weights: settings, and the target's tokenizer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..commands import UserValueError
from ..files import check_is_no_snapshot
from .configuration_gumiho import GumihoConfig


_EMBEDDING = "embed_tokens.weight"

# What `generate(custom_generate=<repository>)` runs: it names the argument that takes a drafter.
_CUSTOM_GENERATE = '''"""Says that a drafter is an `assistant_model`."""

from transformers_gumiho.custom_generation import generate


__all__ = ["generate"]
'''


class SavingMixin:
    """
    Saves a drafter with the files that a server of texts needs besides the drafter itself; for `PreTrainedModel`s.

    Attributes:
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, saved for pipelines that load the drafter.
    """

    config: GumihoConfig
    generation_config: GenerationConfig
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
        As `PreTrainedModel.save_pretrained`; also writes `generation_config.json`, the tokenizer, and code that
        answers `custom_generate=<this drafter>`.

        Args:
            save_embedding (`bool`, *optional*): Whether the token embedding is saved; by default, where the drafter
                has one of its own. What is loaded from files without it reads the embedding of its target.
            *args, **kwargs: As in `PreTrainedModel.save_pretrained`.

        Raises:
            OSError: The folder holds links to files elsewhere.
            ValueError: The embedding is to be saved and the drafter has none, also not its target's; or a distributed
                checkpoint is to be pushed.
        """
        check_is_no_snapshot(save_directory)
        if push_to_hub and kwargs.get("distributed_checkpoint"):
            raise UserValueError(
                "A distributed checkpoint is not what a Gumiho drafter is loaded from. Push with "
                "`distributed_checkpoint=False`, which gathers the weights."
            )
        if self.config.is_mtp:
            # By the names in memory, as trainers read checkpoints: a target's files may hold each expert apart.
            kwargs.setdefault("save_original_format", False)
        with self._as_saved(save_embedding, state_dict) as tensors:
            super().save_pretrained(save_directory, is_main_process, tensors, push_to_hub, *args, **kwargs)  # type: ignore[misc]
        # transformers logs why it does not save into a file.
        if self.should_save_on_this_rank(is_main_process) and not Path(save_directory).is_file():  # type: ignore[attr-defined]
            self._save_companions(Path(save_directory))

    def _upload_modified_files(self, working_dir: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """Adds the companions to what is pushed: `save_pretrained(push_to_hub=True)` uploads before it returns."""
        self._save_companions(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **kwargs)  # type: ignore[misc]

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

    def _save_companions(self, save_directory: Path) -> None:
        self.generation_config.save_pretrained(save_directory)
        folder = save_directory / "custom_generate"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "generate.py").write_text(_CUSTOM_GENERATE, encoding="utf-8")
        os.utime(folder)  # or it would not count as modified where it was there before
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)
