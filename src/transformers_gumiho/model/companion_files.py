"""The files next to a saved drafter's weights: settings, and the target's tokenizer."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

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
        *args: Any,
        save_embedding: bool = True,
        **kwargs: Any,
    ) -> None:
        """
        As `PreTrainedModel.save_pretrained`; also writes `generation_config.json`, the tokenizer, and code that
        answers `custom_generate=<this drafter>`.

        Args:
            save_embedding (`bool`, defaults to `True`): Whether to save the token embedding that the drafter has of
                its own. What is loaded from files without one reads the embedding of its target.

        Raises:
            OSError: The folder holds links to files elsewhere.
        """
        check_is_no_snapshot(save_directory)
        if self.config.is_mtp:
            # By the names in memory, as trainers read checkpoints: a target's files may hold each expert apart.
            kwargs.setdefault("save_original_format", False)
        had_embedding = self.config.has_embedding
        if not save_embedding:
            tensors = state_dict or self.state_dict()  # type: ignore[attr-defined]
            state_dict = {name: tensor for name, tensor in tensors.items() if name != _EMBEDDING}
            self.config.has_embedding = False
        try:
            super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.config.has_embedding = had_embedding
        # transformers logs why it does not save into a file.
        if self.should_save_on_this_rank(is_main_process) and not Path(save_directory).is_file():  # type: ignore[attr-defined]
            self._save_companions(Path(save_directory))

    def _upload_modified_files(self, working_dir: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        # `save_pretrained(push_to_hub=True)` uploads before it returns.
        self._save_companions(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **kwargs)  # type: ignore[misc]

    def _save_companions(self, save_directory: Path) -> None:
        self.generation_config.save_pretrained(save_directory)
        folder = save_directory / "custom_generate"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "generate.py").write_text(_CUSTOM_GENERATE, encoding="utf-8")
        os.utime(folder)  # or it would not count as modified where it was there before
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)
