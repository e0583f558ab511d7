"""The target's features on disk, so that a drafter is trained without running the target, or even having it.

A cache is a folder: `made_from.json` says what it was made from, `cache.json` which rows it holds, `target/` has the
target's config, tokenizer, token embedding and output head, and `shard-*.safetensors` the rows. A file appears under
its name only when it is complete, so that a killed run continues after the shards that exist.
"""

import copy
import json
import os
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import ConcatDataset, Subset
from transformers import AutoConfig

from ..commands import UserFileNotFoundError, UserOSError, UserValueError
from ..generation.verification.target_states import OutputHead, TargetStates
from ..model.modeling_gumiho import GumihoModel
from ..model.target_shape import TargetLayers
from .data.run_files import Record, way_out
from .target_features import OnlineFeatures


MANIFEST, MADE_FROM, TARGET_FOLDER, WEIGHTS = "cache.json", "made_from.json", "target", "target.safetensors"


@dataclass(frozen=True)
class CacheManifest:
    """
    Which rows a cache holds, and how it is cut into shards.

    Attributes:
        columns: The columns of a row besides its states.
        dtype: The dtype of the features.
        target_name: The name that the target was loaded by.
        lengths: The tokens of each row.
        rows_per_shard: Rows in each shard but the last.
        machine: The machine that wrote it. Elsewhere the shards are checked once when the cache is opened.
        target_layer_ids: The target's layers whose states the rows hold, if not the last one alone. Those of the last
            one are in `hidden_states`, those of the others side by side in `layer_states`.
        is_last_normed: As in [`TargetLayers`]. If not, the state of the last layer is among the `layer_states`, too.
        first_shard: The number of the first shard. A recorder deletes its oldest ones.
    """

    columns: list[str]
    dtype: str
    target_name: str
    lengths: list[int]
    rows_per_shard: int
    machine: str
    target_layer_ids: list[int] | None = None
    is_last_normed: bool = True
    first_shard: int = 0

    @property
    def layers(self) -> TargetLayers | None:
        """The layers besides the last states; `None` for these alone."""
        ids = self.target_layer_ids
        return None if ids is None else TargetLayers(tuple(ids), self.is_last_normed)

    def shards(self, folder: Path) -> list[Path]:
        """Returns the shards of a complete cache."""
        numbers = range(self.first_shard, self.first_shard - (-len(self.lengths) // self.rows_per_shard))
        return [folder / f"shard-{number:05d}.safetensors" for number in numbers]

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

    def save(self, folder: Path) -> None:
        """Writes the manifest into `folder`."""
        partial = folder / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(partial, folder / MANIFEST)


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
        self.folder = Path(folder).absolute()  # rows are read later, wherever the program is then
        self.manifest = CacheManifest.load(self.folder)
        self.made_from = Record(self.folder / MADE_FROM).made_from
        self._shards = self.manifest.shards(self.folder)
        found = sum(path.exists() for path in self._shards)
        if found < len(self._shards):
            raise UserValueError(
                f"The feature cache {str(folder)!r} has {found} of {len(self._shards)} shards. Run the extraction "
                f"again: it continues where it was stopped."
            )
        was_moved = self.manifest.machine != platform.node()
        for path in self._shards:
            (load_checked if was_moved else _open)(path)
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.manifest.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        states = ["hidden_states"] if self.manifest.target_layer_ids is None else ["hidden_states", "layer_states"]
        return self._read(index, [*self.manifest.columns, *states])

    def tokens_of(self, index: int) -> dict[str, torch.Tensor]:
        """Returns row `index`, tensors `(L,)`, without its states, which are not read."""
        return self._read(index, self.manifest.columns)

    def _read(self, index: int, columns: list[str]) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of a cache of {len(self)} rows.")
        shard, row = divmod(index, self.manifest.rows_per_shard)
        if shard not in self._open:
            self._open[shard] = _open(self._shards[shard])
        start, stop = self._open[shard].get_slice("offsets")[row : row + 2].tolist()
        return {name: self._open[shard].get_slice(name)[start:stop] for name in columns}

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
        manifest = CacheManifest.load(Path(folder))
        self.made_from = Record(Path(folder) / MADE_FROM).made_from
        self.layers = manifest.layers
        try:
            self.config = AutoConfig.from_pretrained(target)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise damaged(target / "config.json", error) from error
        self.config.name_or_path = manifest.target_name
        weights = load_checked(target / WEIGHTS)
        self.embedding = weights.pop("embed_tokens.weight")
        tensors = {name.removeprefix("lm_head."): tensor for name, tensor in weights.items()}
        num_outputs, num_inputs = tensors["weight"].shape
        self._linear = nn.Linear(num_inputs, num_outputs, bias="bias" in tensors, device="meta")
        self._linear.load_state_dict(tensors, assign=True)
        self._linear.requires_grad_(False)
        self.head = OutputHead(self._linear, self.config)

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
            inputs: The batch; `hidden_states` `(B, L, H)` and, for further layers, `layer_states` `(B, L, k * H)`.

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
        restricted.head = OutputHead(self._linear, self.config, token_ids)
        return restricted


# Where training gets the target's states and logits from.
TargetFeatures = OnlineFeatures | CachedFeatures


def layer_fields(layers: TargetLayers | None) -> dict[str, Any]:
    """Returns how files name these layers."""
    if layers is None:
        return {"target_layer_ids": None}
    return {"target_layer_ids": list(layers.ids), "is_last_normed": layers.is_last_normed}


def located(dataset: Any) -> list[tuple[Any, int]]:
    """Returns where each row of a dataset lies: parts and concatenations lead to the dataset that holds it."""
    if isinstance(dataset, Subset):
        whole = located(dataset.dataset)
        return [whole[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [place for part in dataset.datasets for place in located(part)]
    return [(dataset, index) for index in range(len(dataset))]


def rows_without_states(dataset: Any, indices: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yields these rows of a dataset with a length; the states of a [`FeatureDataset`] are not read."""
    places = located(dataset)
    for holder, index in map(places.__getitem__, indices):
        yield holder.tokens_of(index) if isinstance(holder, FeatureDataset) else holder[index]


def row_lengths(dataset: Any) -> list[int] | None:
    """Returns the tokens of each row of a dataset without reading states; `None` for a stream or an unknown class."""
    if isinstance(dataset, (Subset, ConcatDataset)):
        places = located(dataset)
        holders = {id(holder): holder for holder, _ in places}
        lengths = {key: row_lengths(holder) for key, holder in holders.items()}
        return None if None in lengths.values() else [(lengths[id(holder)] or [])[index] for holder, index in places]
    if isinstance(dataset, FeatureDataset):
        return dataset.manifest.lengths
    if hasattr(dataset, "with_format"):  # of the library `datasets`, which recording does not need
        return [len(ids) for ids in dataset.with_format("numpy")["input_ids"]]
    return [len(row["input_ids"]) for row in dataset] if isinstance(dataset, list) else None


def save_shard(rows: Sequence[Mapping[str, torch.Tensor]], path: Path) -> None:
    """Writes a shard of rows: the values of all in one piece, and where each begins."""
    offsets = torch.tensor([0, *(len(row["input_ids"]) for row in rows)], device="cpu").cumsum(0)
    save_completely({"offsets": offsets} | {name: torch.cat([row[name] for row in rows]) for name in rows[0]}, path)


def save_completely(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a file with its checksum, or none; raises `OSError` where the disk is full."""
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, {"checksum": _checksum(tensors)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserOSError(
            f"Could not write {str(path)!r}: {error}. The shards before it are complete. {way_out(error)}."
        ) from error


def load_checked(path: Path) -> dict[str, torch.Tensor]:
    """Reads all of a file; raises `ValueError` where it is not what was written."""
    file = _open(path)
    tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    if _checksum(tensors) != (file.metadata() or {}).get("checksum"):
        raise damaged(path, "it has another checksum")
    return tensors


def is_complete(folder: Path) -> bool:
    """Whether a cache has all of its files, none of which is cut. They are not read."""
    try:
        for path in [folder / TARGET_FOLDER / WEIGHTS, *CacheManifest.load(folder).shards(folder)]:
            _open(path)
    except (FileNotFoundError, ValueError):
        return False
    return True


def is_intact(path: Path) -> bool:
    """Whether a file is there as it was written."""
    try:
        load_checked(path)
    except ValueError:
        return False
    return True


def _open(path: Path) -> Any:
    """Opens a file; raises `ValueError` where it is missing or incomplete."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: object) -> ValueError:
    """Returns the error of a damaged file of a cache."""
    return UserValueError(f"{str(path)!r} is damaged: {error}. Run what wrote it again, which writes this file anew.")


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return str(found)
