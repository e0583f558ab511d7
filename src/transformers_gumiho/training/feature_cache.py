"""The target's features on disk, so that a drafter is trained without running the target, or even having it.

A cache is a folder: `made_from.json` says what it was made from, `target/` has the target's config, tokenizer, token
embedding and output head, and each `shard-*.safetensors` some rows with their numbers. Shards are only ever added: one
gets its name when it is complete, and never changes then.
"""

import copy
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import ConcatDataset, Subset
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..commands import UserFileNotFoundError, UserValueError
from ..generation.verification.target_states import OutputHead, TargetStates
from ..generation.verification.traits import input_device
from ..model.modeling_gumiho import GumihoModel
from ..model.target_shape import TargetLayers
from ..model.token_embedding import fitting_rows
from .data.manifest import MADE_FROM, Manifest
from .data.run_files import os_errors_named
from .target_features import OnlineFeatures


TARGET_FOLDER, WEIGHTS = "target", "target.safetensors"
NUMBERS, LENGTHS = "numbers", "lengths"  # of the rows of a shard
STATES = ("hidden_states", "layer_states")


class FeatureDataset(torch.utils.data.Dataset):
    """
    The rows of a feature cache in their order, with `hidden_states` and, where it holds more layers, `layer_states`.

    Args:
        folder: The cache.
        verify: Reads all files once, and compares their checksums. Otherwise only a file that was cut is noticed.

    Attributes:
        lengths: The tokens of each row.
        made_from: What the rows were made from.

    Raises:
        FileNotFoundError: The folder holds no cache.
        ValueError: The cache is incomplete, or a file of it is damaged.
    """

    def __init__(self, folder: str | Path, verify: bool = False):
        self.folder = Path(folder).absolute()  # rows are read later, wherever the program is then
        self.manifest = manifest_of_cache(self.folder)
        self._shards = shards_of(self.folder)
        rows = list[tuple[int, int, int, int]]()  # number, length, shard and place in it
        for shard, path in enumerate(self._shards):
            start = 0
            for number, length in rows_of(path):
                rows.append((number, length, shard, start))
                start += length
        rows.sort()
        self.made_from = self.manifest.made_from
        if len(rows) < (wanted := self.made_from.get("num_rows", 1)):
            raise UserValueError(
                f"The feature cache {str(folder)!r} has {len(rows)} of {wanted} rows. Run what wrote it again: it "
                f"continues where it was stopped."
            )
        self.lengths = [length for _, length, *_ in rows]
        self._places = [(shard, start) for *_, shard, start in rows]
        if recording := self.made_from.get("recording"):
            numbers = f"rows {rows[0][0]} to {rows[-1][0]}"
            self.made_from = self.made_from | {"data": f"{numbers} of the recording {recording}"}
        for path in [*self._shards, self.folder / TARGET_FOLDER / WEIGHTS] if verify else ():
            if checksum(tensors_of(path)) != (open_file(path).metadata() or {}).get("checksum"):
                raise damaged(path, "it has another checksum")
        self._open: dict[int, Any] = {}
        names = set(open_file(self._shards[0]).keys())
        self.columns = sorted(names - {NUMBERS, LENGTHS, *STATES})
        self._states = [name for name in STATES if name in names]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._read(index, [*self.columns, *self._states])

    def tokens_of(self, index: int) -> dict[str, torch.Tensor]:
        """Returns row `index`, tensors `(L,)`, without its states, which are not read."""
        return self._read(index, self.columns)

    def _read(self, index: int, columns: list[str]) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of a cache of {len(self)} rows.")
        shard, start = self._places[index]
        if shard not in self._open:
            self._open[shard] = open_file(self._shards[shard])
        stop = start + self.lengths[index]
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
        self.made_from = manifest_of_cache(Path(folder)).made_from
        self.layers = layers_in(self.made_from)
        try:
            self.config = AutoConfig.from_pretrained(target)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise damaged(target / "config.json", error) from error
        self.config.name_or_path = self.made_from["target_name"]
        weights = tensors_of(target / WEIGHTS)
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


def manifest_of_cache(folder: Path) -> Manifest:
    """Returns a cache's manifest; raises `FileNotFoundError` for no cache."""
    manifest = Manifest(folder)
    if "dtype" not in manifest.made_from:
        raise UserFileNotFoundError(f"{str(folder)!r} is no feature cache: it has no {MADE_FROM} of one.")
    return manifest


def layer_fields(layers: TargetLayers | None) -> dict[str, Any]:
    """Returns how a manifest names these layers."""
    if layers is None:
        return {"target_layer_ids": None}
    return {"target_layer_ids": list(layers.ids), "is_last_normed": layers.is_last_normed}


def layers_in(made_from: dict[str, Any]) -> TargetLayers | None:
    """Returns the layers that a manifest names, besides the last states; `None` for these alone."""
    ids = made_from["target_layer_ids"]
    return None if ids is None else TargetLayers(tuple(ids), made_from["is_last_normed"])


def located(dataset: Any) -> list[tuple[Any, int]]:
    """Returns where each row of a dataset lies: parts and concatenations lead to the dataset that holds it."""
    if isinstance(dataset, Subset):
        places = located(dataset.dataset)
        return [places[index] for index in dataset.indices]
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
    if isinstance(dataset, Subset):
        lengths = row_lengths(dataset.dataset)
        return None if lengths is None else [lengths[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [row_lengths(part) for part in dataset.datasets]
        return None if None in parts else [length for part in parts for length in part or ()]
    if isinstance(dataset, FeatureDataset):
        return dataset.lengths
    if hasattr(dataset, "with_format"):  # of the library `datasets`, which recording does not need
        return [len(ids) for ids in dataset.with_format("numpy")["input_ids"]]
    return [len(row["input_ids"]) for row in dataset] if isinstance(dataset, list) else None


def is_complete(folder: Path) -> bool:
    """Whether a cache has all of its rows, and no file of it was cut. States are not read."""
    try:
        FeatureDataset(folder)
        open_file(folder / TARGET_FOLDER / WEIGHTS)
    except (FileNotFoundError, ValueError):
        return False
    return True


def shards_of(folder: Path) -> list[Path]:
    """Returns the shards of a cache, of each process in the order in which it wrote them."""
    return sorted(folder.glob("shard-*.safetensors"), key=lambda path: (len(path.name), path.name))


def rows_of(shard: Path) -> list[tuple[int, int]]:
    """Returns the numbers and lengths of a shard's rows; raises `ValueError` where it is damaged."""
    file = open_file(shard)
    try:
        columns = [file.get_tensor(name).tolist() for name in (NUMBERS, LENGTHS)]
    except SafetensorError as error:
        raise damaged(shard, error) from error
    return list(zip(*columns, strict=True))


def open_file(path: Path) -> Any:
    """Opens a file; raises `ValueError` where it is missing or was cut."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Reads all of a file; raises `ValueError` where it is missing or was cut."""
    file = open_file(path)
    return {name: file.get_tensor(name) for name in list(file.keys())}


def damaged(path: Path, error: object) -> ValueError:
    """Returns the error of a damaged file of a cache."""
    return UserValueError(
        f"{str(path)!r} is damaged: {error}. Delete this file, and run what wrote it again, which writes it anew."
    )


def checksum(tensors: dict[str, torch.Tensor]) -> str:
    """Returns the checksum of a file of these tensors."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return str(found)


class CacheWriter:
    """Adds shards to a cache, under names that no other process gives."""

    def __init__(self, folder: Path, process_index: int = 0):
        self._prefix = f"{folder}/shard-{process_index:03d}-"
        own = [path for path in shards_of(folder) if str(path).startswith(self._prefix)]
        numbers = [int(path.stem.rpartition("-")[2]) for path in own]
        self._next = max(numbers, default=-1) + 1

    def save(self, rows: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Writes a shard of rows, given by their numbers; raises `OSError` where it cannot be written."""
        path = Path(f"{self._prefix}{self._next:05d}.safetensors")
        lengths = [len(row["input_ids"]) for row in rows.values()]
        places = {NUMBERS: torch.tensor([*rows], device="cpu"), LENGTHS: torch.tensor(lengths, device="cpu")}
        names = next(iter(rows.values()))
        _save(places | {name: torch.cat([row[name] for row in rows.values()]) for name in names}, path)
        self._next += 1


def missing_rows(folder: Path, lengths: Sequence[int]) -> list[int]:
    """Returns the numbers of the rows, of these lengths, that no shard of a cache holds."""
    there = {number for path in shards_of(folder) for number, _ in rows_of(path)}
    return [number for number in range(len(lengths)) if number not in there]


def delete_unfit(folder: Path, lengths: Sequence[int] | None = None) -> None:
    """Deletes files of a cache that were cut, and shards of rows that have other lengths than these."""
    for path in folder.glob("**/*.partial"):
        path.unlink()
    for path in shards_of(folder):
        fits = False
        with suppress(ValueError):
            rows = rows_of(path)
            fits = lengths is None or all(n < len(lengths) and lengths[n] == length for n, length in rows)
        if not fits:
            path.unlink()


def write_target(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes what a cache knows of its target, where that is not there, or was cut."""
    with suppress(ValueError):
        open_file(folder / TARGET_FOLDER / WEIGHTS)
        return
    embedding = target.get_input_embeddings().weight
    weights = {"embed_tokens.weight": fitting_rows(embedding, *embedding.shape)} | _head_weights(target)
    for part in (target.config, tokenizer):
        part.save_pretrained(folder / TARGET_FOLDER)
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    _save(weights, folder / TARGET_FOLDER / WEIGHTS)


@torch.no_grad()
def _head_weights(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the weight and bias of the output head; of a wrapped one (adapters, offloading) those it amounts to."""
    head = target.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.device.type != "meta":
        return {f"lm_head.{name}": parameter for name, parameter in head.named_parameters()}
    width = getattr(head, "in_features", target.get_input_embeddings().weight.shape[1])
    probe = torch.eye(width, dtype=target.dtype, device=input_device(target))
    bias = head(torch.zeros_like(probe[:1]))[0]
    return {"lm_head.weight": (head(probe) - bias).T, "lm_head.bias": bias}


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a file with its checksum, or none; raises `OSError` where the disk is full."""
    partial = path.with_name(path.name + ".partial")
    try:
        with os_errors_named(path):
            save_file(tensors, partial, {"checksum": checksum(tensors)})
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
