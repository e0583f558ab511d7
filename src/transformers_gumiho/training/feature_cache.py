"""The target's features on disk, so that a drafter is trained without running the target, or even having it.

A cache is a folder: `cache.json` says what it was made from, `target/` holds the target's config, tokenizer, token
embedding and output head, and `shard-*.safetensors` the rows. A shard appears under its name only when it is complete,
so that a killed run continues after the shards that exist.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..model.modeling_gumiho import GumihoModel
from ..user_errors import UserFileNotFoundError, UserValueError
from ..verification.fingerprint import model_fingerprint
from ..verification.target_states import TargetStates, cut_head, scaled_head
from .fingerprint import tokenizer_fingerprints
from .shards import damaged, load_weights, open_shard, read_shard_row, shard_path
from .target_features import OnlineFeatures


MANIFEST, TARGET_FOLDER, WEIGHTS = "cache.json", "target", "target.safetensors"


@dataclass(frozen=True)
class CacheManifest:
    """
    What a cache was made from, and how it is cut into shards.

    Attributes:
        fingerprints: Of the `target`, the `tokenizer`, its chat `template` and the `data`.
        columns: The columns of a row besides `hidden_states`.
        dtype: Of the features.
        target_name: What the target was loaded as.
        num_rows: Rows in all shards.
        num_tokens: Tokens in all rows.
        rows_per_shard: Rows in each shard but the last.
        checksum_seed: What the checksums of the rows begin with, so that shards of something else do not match.
        weights_checksum: Of the target's weights that the cache holds; `None` before they are written.
        target_layer_ids: The target's layers whose states the rows hold, if not the last one alone. Those of the last
            one are in `hidden_states`, those of the others side by side in `layer_states`.
    """

    fingerprints: dict[str, str]
    columns: list[str]
    dtype: str
    target_name: str
    num_rows: int
    num_tokens: int
    rows_per_shard: int
    checksum_seed: int
    weights_checksum: int | None = None
    target_layer_ids: list[int] | None = None

    @property
    def feature_columns(self) -> list[str]:
        """The columns of a row that hold states."""
        return ["hidden_states"] if self.target_layer_ids is None else ["hidden_states", "layer_states"]

    @property
    def num_shards(self) -> int:
        """Shards of a complete cache."""
        return -(-self.num_rows // self.rows_per_shard)

    def rows_of(self, shard: int) -> range:
        """Returns the rows of a shard."""
        return range(self.num_rows)[shard * self.rows_per_shard :][: self.rows_per_shard]

    @property
    def made_from(self) -> dict[str, str]:
        """What the rows of a cache have in common with those that it can be used with, by name."""
        return {**self.fingerprints, "dtype": self.dtype, "target_layer_ids": str(self.target_layer_ids)}

    @classmethod
    def load(cls, folder: Path) -> "CacheManifest":
        """Reads the manifest in `folder`; raises `FileNotFoundError` without one, `ValueError` for a damaged one."""
        path = folder / MANIFEST
        if not path.exists():
            raise UserFileNotFoundError(f"{str(folder)!r} is no feature cache: it has no {MANIFEST}.")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            # Of earlier versions, which wrote nothing else there.
            return cls(**{name: value for name, value in found.items() if (name, value) != ("shard_rows", None)})
        except (ValueError, TypeError) as error:
            raise damaged(path, error) from error

    def check(self, wanted: dict[str, str], folder: Path, way_out: str) -> None:
        """Raises `ValueError` where the cache was not made from what is wanted, some of [`made_from`]."""
        found = self.made_from
        if stale := [name for name, value in wanted.items() if found.get(name) != value]:
            named = [f"{name} ({found[name]})" if name in ("dtype", "target_layer_ids") else name for name in stale]
            raise UserValueError(
                f"The feature cache {str(folder)!r} was made from another {' and another '.join(named)}. {way_out}"
            )


class FeatureDataset(torch.utils.data.Dataset):
    """
    The rows of a complete feature cache, with `hidden_states` and, where it holds more layers, `layer_states`.

    Args:
        folder: The cache.
        target: If given, the cache must have been made from it.
        tokenizer: If given, the cache must have been made with it.

    Raises:
        FileNotFoundError: The folder holds no cache.
        ValueError: The cache is incomplete, was made from something else, or is damaged; damaged rows are found when
            they are read.
    """

    def __init__(
        self,
        folder: str | Path,
        target: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.folder = Path(folder)
        self.manifest = CacheManifest.load(self.folder)
        fingerprints = {"target": model_fingerprint(target)} if target is not None else {}
        fingerprints |= tokenizer_fingerprints(tokenizer) if tokenizer is not None else {}
        self.manifest.check(fingerprints, self.folder, "Extract features anew, or give what it was made from.")
        found = sum(shard_path(self.folder, index).exists() for index in range(self.manifest.num_shards))
        if found < self.manifest.num_shards:
            raise UserValueError(
                f"The feature cache {str(folder)!r} has {found} of {self.manifest.num_shards} shards. Run the "
                f"extraction again: it continues where it was stopped."
            )
        for index in range(self.manifest.num_shards):
            open_shard(shard_path(self.folder, index))
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.manifest.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        columns = [*self.manifest.columns, *self.manifest.feature_columns]
        return self._read(index, columns, self.manifest.checksum_seed)

    def tokens_of(self, index: int) -> dict[str, torch.Tensor]:
        """Returns row `index`, tensors `(L,)`, without its states, which are not read."""
        return self._read(index, self.manifest.columns)

    def _read(self, index: int, columns: list[str], seed: int | None = None) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of a cache of {len(self)} rows.")
        shard, row = divmod(index, self.manifest.rows_per_shard)
        if shard not in self._open:
            self._open[shard] = open_shard(shard_path(self.folder, shard))
        try:
            return read_shard_row(self._open[shard], row, columns, seed)
        except ValueError as error:
            raise damaged(shard_path(self.folder, shard), error) from error

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
        self.layer_ids = self.manifest.target_layer_ids
        try:
            self.config = AutoConfig.from_pretrained(target)
        except (OSError, ValueError) as error:
            raise damaged(target / "config.json", error) from error
        self.config.name_or_path = self.manifest.target_name
        weights = load_weights(target / WEIGHTS, self.manifest.weights_checksum)
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
        if self.layer_ids is None:
            return TargetStates.from_last(last)
        layers = inputs["layer_states"]
        if len(kept_layers(self.layer_ids, self.config)) < len(self.layer_ids):
            layers = torch.cat((layers, last), dim=-1)
        return TargetStates(layers, last)

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


def kept_layers(layer_ids: Sequence[int] | None, config: PreTrainedConfig) -> list[int]:
    """Returns those of a target's layers whose states are kept next to the last ones."""
    last = config.get_text_config(decoder=True).num_hidden_layers - 1
    return [number for number in layer_ids or () if number < last]
