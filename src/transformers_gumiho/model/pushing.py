"""One commit to the Hub of all that saving a model writes, whatever writes it."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from transformers.utils.hub import create_and_tag_model_card


class Push:
    """
    Uploads the files that are written into a folder after this was made. `save_pretrained(push_to_hub=True)` uploads
    before a subclass can add files of its own.

    Args:
        folder: Where the model is saved.
        repo_id: The repository, which is made if there is none; by default it is named after the folder.
        commit_message: Of the commit.
        create_pr: Whether to open a pull request instead.
        token: For the Hub.
        **creation: The other arguments of `huggingface_hub.create_repo`.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        repo_id: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        token: str | bool | None = None,
        **creation: Any,
    ):
        self.folder = Path(folder)
        self.api = HfApi(token=token)
        self.token = token
        self.repo_id = self.api.create_repo(repo_id or self.folder.name, exist_ok=True, **creation).repo_id
        self.commit_message = commit_message or "Upload model"
        self.create_pr = create_pr
        self._before = self._modification_times()

    def commit(self, tags: list[str] | None, always: set[Path]) -> None:
        """
        Uploads the files that are new or changed, and those in `always`.

        Args:
            tags: For the model card, which is written if the repository has none.
            always: Files that may have been written without a change that shows.
        """
        create_and_tag_model_card(self.repo_id, tags, token=self.token).save(self.folder / "README.md")
        changed = {file for file, time in self._modification_times().items() if self._before.get(file) != time}
        operations = [
            CommitOperationAdd(path_in_repo=file.relative_to(self.folder).as_posix(), path_or_fileobj=file)
            for file in sorted(changed | always)
        ]
        self.api.create_commit(self.repo_id, operations, commit_message=self.commit_message, create_pr=self.create_pr)

    def _modification_times(self) -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in self.folder.rglob("*") if file.is_file()}
