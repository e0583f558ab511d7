"""The states computed while a target answers, kept as a feature cache: no second pass is needed."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...target.fingerprint import model_fingerprint
from ..feature_cache import MANIFEST, CacheManifest
from ..feature_extraction import begin_cache, find_manifest, save_whole
from ..fingerprint import rows_fingerprint, tokenizer_fingerprints
from ..shards import is_intact, make_shard, shard_path


_COLUMNS = ["input_ids", "loss_mask"]
_SEED = 0  # of checksums: what the cache is made from is known at the end


@dataclass(frozen=True)
class AnswerFeatures:
    """
    A prompt and its answer as a row of a feature cache.

    Attributes:
        prompt: Token ids.
        answer: Token ids, with the end where there is one.
        states (`(T, H)`): The target's last hidden states of both.
    """

    prompt: list[int]
    answer: list[int]
    states: torch.Tensor

    @property
    def loss_mask(self) -> list[int]:
        """1 at the states that count as targets: those of answer tokens that another answer token follows."""
        return [0] * len(self.prompt) + [1] * (len(self.answer) - 1) + [0]


class AnswerFeatureCache:
    """
    A feature cache with a shard for each batch of answers. It is one, with a manifest, when all are there.

    Args:
        folder: The cache.
        dtype: Of the features.
    """

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.folder, self.dtype = folder, dtype
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, batch: int) -> bool:
        """Whether the features of a batch are there, as they were written."""
        return is_intact(shard_path(self.folder, batch), [*_COLUMNS, "hidden_states"], _SEED)

    def write(self, batch: int, rows: Sequence[AnswerFeatures]) -> None:
        """
        Writes the features of a batch.

        Raises:
            OSError: The disk is full. The batches before are complete.
        """
        (self.folder / MANIFEST).unlink(missing_ok=True)  # of answers that were deleted to be written anew
        tokens = [[torch.tensor(v, dtype=torch.int32) for v in (r.prompt + r.answer, r.loss_mask)] for r in rows]
        shard = [
            dict(zip(_COLUMNS, columns, strict=True)) | {"hidden_states": row.states}
            for row, columns in zip(rows, tokens, strict=True)
        ]
        save_whole(make_shard(shard, _SEED), shard_path(self.folder, batch))

    def finish(self, num_batches: int, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Writes the manifest and what the cache holds of the target."""
        if (found := find_manifest(self.folder)) is not None:
            begin_cache(self.folder, found, target, tokenizer)
            return
        offsets = [self._tensor(batch, "offsets") for batch in range(num_batches)]
        shard_rows = [len(values) - 1 for values in offsets]
        data = rows_fingerprint(self._rows(offsets), _COLUMNS)
        manifest = CacheManifest(
            fingerprints={"target": model_fingerprint(target), "data": data} | tokenizer_fingerprints(tokenizer),
            columns=_COLUMNS,
            dtype=str(self.dtype).removeprefix("torch."),
            target_name=target.config.name_or_path,
            num_rows=sum(shard_rows),
            num_tokens=sum(int(values[-1]) for values in offsets),
            rows_per_shard=max(shard_rows),
            shard_rows=shard_rows,
            checksum_seed=_SEED,
        )
        begin_cache(self.folder, manifest, target, tokenizer)

    def _rows(self, offsets: list[torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        for batch, values in enumerate(offsets):
            columns = {name: self._tensor(batch, name) for name in (_COLUMNS if len(values) > 1 else ())}
            for start, stop in itertools.pairwise(values.tolist()):
                yield {name: column[start:stop] for name, column in columns.items()}

    def _tensor(self, batch: int, name: str) -> torch.Tensor:
        with safe_open(shard_path(self.folder, batch), framework="pt") as file:
            return file.get_tensor(name)
