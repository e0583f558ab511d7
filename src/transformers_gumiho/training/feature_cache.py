"""The target's features on disk, so that a drafter is trained without running the target, or even having it.

A cache is a folder: `made_from.json` says what it was made from, `cache.json` which rows it holds, `target/` has the
target's config, tokenizer, token embedding and output head, and `shard-*.safetensors` the rows. A shard appears under
its name only when it is complete, so that a killed run continues after the shards that exist.
"""

import copy
import json
import platform
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import ConcatDataset, Subset
from transformers import AutoConfig, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..model.modeling_gumiho import GumihoModel
from ..model.target_shape import TargetLayers
from ..resumable_file import Record
from ..user_errors import UserFileNotFoundError, UserValueError
from ..verification.target_states import TargetStates, cut_head, scaled_head
from .shards import damaged, load_checked, open_file, read_row, shard_path
from .target_features import OnlineFeatures


MANIFEST, MADE_FROM, TARGET_FOLDER, WEIGHTS = "cache.json", "made_from.json", "target", "target.safetensors"


@dataclass(frozen=True)
class CacheManifest:
    """
    Which rows a cache holds, and how it is cut into shards.

    Attributes:
        columns: The columns of a row besides `hidden_states`.
        dtype: The dtype of the features.
        target_name: The name that the target was loaded by.
        lengths: The tokens of each row.
        rows_per_shard: Rows in each shard but the last.
        machine: The machine that wrote it. Elsewhere the shards are checked once when the cache is opened.
        target_layer_ids: The target's layers whose states the rows hold, if not the last one alone. Those of the last
            one are in `hidden_states`, those of the others side by side in `layer_states`.
        is_last_normed: As in [`TargetLayers`]. If not, the state of the last layer is among the `layer_states`, too.
    """

    columns: list[str]
    dtype: str
    target_name: str
    lengths: list[int]
    rows_per_shard: int
    machine: str
    target_layer_ids: list[int] | None = None
    is_last_normed: bool = True

    @property
    def layers(self) -> TargetLayers | None:
        """The layers whose states the rows hold, if not the last ones alone."""
        ids = self.target_layer_ids
        return None if ids is None else TargetLayers(tuple(ids), self.is_last_normed)

    @property
    def feature_columns(self) -> list[str]:
        """The columns of a row that hold states."""
        return ["hidden_states"] if self.target_layer_ids is None else ["hidden_states", "layer_states"]

    @property
    def num_shards(self) -> int:
        """Shards of a complete cache."""
        return -(-len(self.lengths) // self.rows_per_shard)

    def rows_of(self, shard: int) -> range:
        """Returns the rows of a shard."""
        return range(len(self.lengths))[shard * self.rows_per_shard :][: self.rows_per_shard]

    @classmethod
    def load(cls, folder: Path) -> "CacheManifest":
        """Reads the manifest in `folder`; raises `FileNotFoundError` without one, `ValueError` for a damaged one."""
        path = folder / MANIFEST
        if not path.exists():
            raise UserFileNotFoundError(f"{str(folder)!r} is no feature cache: it has no {MANIFEST}.")
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise damaged(path, error) from error


class FeatureDataset(torch.utils.data.Dataset):
    """
    The rows of a complete feature cache, with `hidden_states` and, where it holds more layers, `layer_states`.

    Args:
        folder: The cache.

    Raises:
        FileNotFoundError: The folder holds no cache.
        ValueError: The cache is incomplete, or a file of it is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = CacheManifest.load(self.folder)
        self.made_from = Record(self.folder / MADE_FROM).made_from
        paths = [shard_path(self.folder, index) for index in range(self.manifest.num_shards)]
        found = sum(path.exists() for path in paths)
        if found < len(paths):
            raise UserValueError(
                f"The feature cache {str(folder)!r} has {found} of {len(paths)} shards. Run the extraction again: it "
                f"continues where it was stopped."
            )
        was_moved = self.manifest.machine != platform.node()
        for path in paths:
            (load_checked if was_moved else open_file)(path)
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.manifest.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._read(index, [*self.manifest.columns, *self.manifest.feature_columns])

    def tokens_of(self, index: int) -> dict[str, torch.Tensor]:
        """Returns row `index`, tensors `(L,)`, without its states, which are not read."""
        return self._read(index, self.manifest.columns)

    def _read(self, index: int, columns: list[str]) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of a cache of {len(self)} rows.")
        shard, row = divmod(index, self.manifest.rows_per_shard)
        if shard not in self._open:
            self._open[shard] = open_file(shard_path(self.folder, shard))
        return read_row(self._open[shard], row, columns)

    def __getstate__(self) -> dict[str, Any]:
        # Workers of a data loader open the files themselves.
        return self.__dict__ | {"_open": {}}


class CachedFeatures:
    """
    What a feature cache knows of its target: pass it to [`GumihoTrainer`] as `target`, with a [`FeatureDataset`].

    Args:
        folder: The cache.

    Raises:
        FileNotFoundError: The folder holds no cache.
        ValueError: It is damaged.
    """

    def __init__(self, folder: str | Path):
        target = Path(folder) / TARGET_FOLDER
        self.manifest = CacheManifest.load(Path(folder))
        self.made_from = Record(Path(folder) / MADE_FROM).made_from
        self.layers = self.manifest.layers
        try:
            self.config = AutoConfig.from_pretrained(target)
        except (OSError, ValueError) as error:
            raise damaged(target / "config.json", error) from error
        self.config.name_or_path = self.manifest.target_name
        weights = load_checked(target / WEIGHTS)
        self.embedding = weights["embed_tokens.weight"]
        head = weights["lm_head.weight"]
        self._linear = nn.Linear(head.shape[1], head.shape[0], bias="lm_head.bias" in weights, device="meta")
        tensors = {name.removeprefix("lm_head."): tensor for name, tensor in weights.items() if "lm_head." in name}
        self._linear.load_state_dict(tensors, assign=True)
        self._linear.requires_grad_(False)
        self.head = scaled_head(self._linear, self.config)

    def make_drafter(self, **overrides: Any) -> GumihoModel:
        """Makes an untrained drafter for the target, as [`GumihoModel.from_target`] does, with its `overrides`."""
        return GumihoModel.from_embedding(self.config, self.embedding, **overrides)

    def to(self, device: torch.device) -> None:
        """Moves the output head to `device`."""
        self._linear.to(device)

    def states(self, inputs: dict[str, torch.Tensor]) -> TargetStates:
        """
        Returns the cached states of a batch of rows.

        Args:
            inputs: The batch; `hidden_states` `(B, L, k * H)` holds the states of the k layers that are cached.

        Raises:
            ValueError: The rows hold no `hidden_states`.
        """
        if "hidden_states" not in inputs:
            raise UserValueError("The rows hold no `hidden_states`. Train on the `FeatureDataset` of the same cache.")
        last = inputs["hidden_states"]
        if self.layers is None:
            return TargetStates.from_last(last)
        states = inputs["layer_states"]
        if len(self.layers.besides_last_states(self.config)) < len(self.layers.ids):
            states = torch.cat((states, last), dim=-1)
        return TargetStates(states, last)

    def lm_head(self, like: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the target's output head, from features `(..., H)` of any dtype; `like` is not needed for it."""
        return lambda features: self.head(features.to(self._linear.weight.dtype))

    def restricted_to(self, token_ids: torch.Tensor) -> "CachedFeatures":
        """Returns the same features with the logits of `token_ids` `(K,)` alone."""
        restricted = copy.copy(self)
        restricted.head = scaled_head(cut_head(self._linear, token_ids), self.config)
        return restricted


# Where training gets the target's states and logits from.
TargetFeatures = OnlineFeatures | CachedFeatures


def layer_fields(layers: TargetLayers | None) -> dict[str, Any]:
    """Returns how files name these layers."""
    if layers is None:
        return {"target_layer_ids": None}
    return {"target_layer_ids": list(layers.ids), "is_last_normed": layers.is_last_normed}


def rows_without_states(dataset: Any, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields these rows of a dataset with a length; the states of a [`FeatureDataset`] are not read."""
    if isinstance(dataset, Subset):
        return rows_without_states(dataset.dataset, [dataset.indices[index] for index in indices])
    if isinstance(dataset, ConcatDataset):
        starts = [0, *dataset.cumulative_sizes]
        pairs = ((bisect_right(dataset.cumulative_sizes, index), index) for index in indices)
        return (row for i, index in pairs for row in rows_without_states(dataset.datasets[i], [index - starts[i]]))
    read = dataset.tokens_of if isinstance(dataset, FeatureDataset) else dataset.__getitem__
    return (read(index) for index in indices)


def row_lengths(dataset: Any) -> list[int] | None:
    """Returns the tokens of each row of a dataset without reading states; `None` for a stream or an unknown class."""
    if isinstance(dataset, Subset):
        lengths = row_lengths(dataset.dataset)
        return None if lengths is None else [lengths[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [row_lengths(part) for part in dataset.datasets]
        return None if None in parts else [length for part in parts for length in part or ()]
    if isinstance(dataset, FeatureDataset):
        return dataset.manifest.lengths
    if isinstance(dataset, Dataset):
        return [len(ids) for ids in dataset.with_format("numpy")["input_ids"]]
    return [len(row["input_ids"]) for row in dataset] if isinstance(dataset, list) else None


def length_sampler(
    dataset: Any, args: TrainingArguments, rows_at_a_time: int, seed: int | None = None
) -> LengthGroupedSampler | None:
    """
    Returns a sampler of rows of like length for `train_sampling_strategy="group_by_length"`, else `None`. `Trainer`'s
    own would read all rows, with their states.
    """
    lengths = row_lengths(dataset) if args.train_sampling_strategy == "group_by_length" else None
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return None if not lengths else LengthGroupedSampler(rows_at_a_time, lengths=lengths, generator=generator)
