"""Recording what a target generates: its states and tokens in a feature cache, to train a drafter on."""

import os
import platform
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..commands import UserValueError, as_user_errors
from ..generation.verification.target_memory import memory_of
from ..internals import version_of
from ..model.modeling_gumiho import GumihoModel
from ..model.target_shape import TargetLayers
from ..model.wrappers import as_target
from .data.fingerprint import adapters_of, model_fingerprint, tokenizer_fingerprints
from .data.run_files import Record, sole_writer
from .feature_cache import (
    MADE_FROM,
    MANIFEST,
    TARGET_FOLDER,
    WEIGHTS,
    CacheManifest,
    FeatureDataset,
    is_intact,
    layer_fields,
    save_shard,
)
from .feature_extraction import write_target
from .recorded_call import DTYPE, RecordedCall


logger = logging.get_logger(__name__)

_ROWS_PER_SHARD = 16
_CHANGED = "the target's weights or adapters have changed. Record into another folder"


def record(
    target: nn.Module,
    folder: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_gigabytes: float = 10.0,
    share: float = 1.0,
) -> "Recorder":
    """
    Writes what a target generates with a drafter, prompts included, into a feature cache, which
    `gumiho train --features FOLDER --drafter DRAFTER` trains on. It holds the states that the drafter reads, and the
    last ones. Calls without a drafter are not recorded. The text is the same as without recording.

    Whatever happens to the recorder, a full disk or other weights of the target, it warns once and stops, and decoding
    goes on. Several threads may generate. Use it as a context manager, or call [`Recorder.stop`].

    Args:
        target: The target, or a wrapper of it.
        folder: The cache: a new folder, or one that was recorded from this target before. Its owner alone can read it.
        tokenizer: The target's. By default the one in the folder that the target was loaded from.
        max_gigabytes: Size of the recorded rows. The oldest are deleted to make room.
        share: Share of the calls that are recorded. Which ones is drawn without PyTorch's or Python's random state.

    Raises:
        ValueError: `target` or `tokenizer` is none, the folder was recorded from another target or with another
            tokenizer, or a number is out of range.
        OSError: The folder cannot be written.

    Example:

    ```python
    >>> from tempfile import TemporaryDirectory
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from transformers_gumiho import GumihoModel, record

    >>> tokenizer = AutoTokenizer.from_pretrained("examples/demo_pair/target")
    >>> target = AutoModelForCausalLM.from_pretrained("examples/demo_pair/target", dtype="float32")
    >>> gumiho = GumihoModel.from_pretrained("examples/demo_pair/gumiho", dtype="float32")
    >>> inputs = tokenizer("def read(self):", return_tensors="pt")
    >>> with TemporaryDirectory() as folder, record(target, folder) as recorder:
    ...     output = target.generate(**inputs, assistant_model=gumiho, max_new_tokens=33)
    ...     recorder.stop()
    ...     recorder.num_tokens == output.shape[1] - 1  # the last token has no state
    True

    ```
    """
    inner, folder = as_target(target), Path(folder).absolute()  # wherever the program goes
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise UserValueError(f"`tokenizer` must be the target's tokenizer, got {tokenizer!r}.")
    if not (0 < share <= 1 and max_gigabytes > 0):
        raise UserValueError(
            f"`share` must be above 0 and at most 1, got {share}, and `max_gigabytes` above 0, got {max_gigabytes}."
        )
    name = inner.config.name_or_path
    try:
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise UserValueError(
            f"No tokenizer can be loaded from {name!r}, where the target comes from ({error}). Give `tokenizer`."
        ) from error
    return Recorder(inner, folder, tokenizer, max_gigabytes, share)


def record_once(target: PreTrainedModel, folder: str) -> None:
    """Begins to record a target in its first call. Where that fails, it warns once, and nothing is recorded."""
    memory = memory_of(target)
    if not memory.was_recorded:
        memory.was_recorded = True
        try:
            record(target, folder)
        except Exception as error:
            logger.warning(f"Nothing is recorded: {error}")


class Recorder:
    """
    Records the drafted calls of a target; [`record`] makes it.

    Args:
        target, folder, tokenizer, max_gigabytes, share: As in [`record`].

    Attributes:
        folder: The feature cache.
        is_running: Whether further calls are recorded.
    """

    def __init__(
        self, target: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, max_gigabytes: float,
        share: float,
    ):  # fmt: skip
        self.folder, self.is_running = folder, True
        self._target, self._share, self._max_bytes = weakref.ref(target), share, max_gigabytes * 1e9
        self._lock, self._writing, self._process = threading.RLock(), ExitStack(), os.getpid()
        self._calls: list[RecordedCall] = []  # that have ended, and are not read yet
        self._rows: list[dict[str, torch.Tensor]] = []  # of the shard that is not full yet
        self._manifest: CacheManifest | None = None
        model = model_fingerprint(target)
        self._made_from: dict[str, Any] = {"target": model, "model": model, **tokenizer_fingerprints(tokenizer)}
        self._seen = _versions(target)
        with as_user_errors():
            folder.mkdir(parents=True, exist_ok=True)
        try:
            self._writing.enter_context(sole_writer(folder))
        except OSError as error:
            self._give_up(error)
            return
        with self._writing, as_user_errors():
            self._open(target, tokenizer)
            self._writing = self._writing.pop_all()
        memory_of(target).observers.append(self._observe)
        weakref.finalize(target, self.stop)  # when Python ends, at the latest

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows that are written."""
        return sum(self._manifest.lengths) if self._manifest else 0

    def stop(self) -> None:
        """Writes the rest, and ends the recording."""
        with self._lock:
            if self.is_running and os.getpid() == self._process:
                with self._giving_up():
                    self._check_calls()
                    self._read_calls()
                    self._write_shard()
                self._end()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def _open(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Begins a cache, or reads what an earlier recording left. Raises `ValueError` where that does not fit."""
        record = Record(self.folder / MADE_FROM)
        if any(self.folder.iterdir()) and "recording" not in record.made_from:
            raise UserValueError(f"{str(self.folder)!r} holds something else than a recording. Name a new folder.")
        record.check(self._made_from, "Record into another folder.")
        self._made_from = {"recording": os.urandom(8).hex(), "num_rows": 0} | record.made_from | self._made_from
        self.folder.chmod(0o700)
        record.write(self._made_from, is_finished=record.is_finished)
        if (self.folder / MANIFEST).exists():
            dataset, manifest = FeatureDataset(self.folder), CacheManifest.load(self.folder)
            # Every shard but the last has as many rows: those of the last one are written again with the next ones.
            num_open = len(manifest.lengths) % _ROWS_PER_SHARD
            self._manifest = replace(manifest, lengths=manifest.lengths[: len(manifest.lengths) - num_open])
            self._rows = [dataset[row] for row in range(len(dataset) - num_open, len(dataset))]
        if not is_intact(self.folder / TARGET_FOLDER / WEIGHTS):
            write_target(target, tokenizer, self.folder)

    def _observe(self, drafter: GumihoModel) -> RecordedCall | None:
        """Returns the observer of a call that begins, unless it is not to be recorded."""
        target = self._target()
        if target is None or (self._share < 1 and SystemRandom().random() >= self._share):
            return None
        with self._lock, self._giving_up():
            if not self.is_running:
                return None
            if os.getpid() != self._process:
                raise UserValueError("this is another process than the one that began it")
            if (versions := _versions(target)) != self._seen:
                if not self._has_its_weights():
                    self._read_calls()
                    raise UserValueError(_CHANGED)
                self._seen = versions
            layers = drafter.config.layers_read(target.config)
            self._fit_layers(target, layers)
            num_layers = None if layers is None else len(layers.besides_last_states(target.config))
            return RecordedCall(num_layers, drafter.config.get_text_config().vocab_size, self._add, self._giving_up)
        return None

    def _fit_layers(self, target: PreTrainedModel, layers: TargetLayers | None) -> None:
        """Raises `ValueError` where the cache is of other layers than these, which a drafter reads."""
        if self._manifest is None:
            self._manifest = CacheManifest(
                columns=["input_ids", "loss_mask"],
                dtype=str(DTYPE).removeprefix("torch."),
                target_name=target.config.name_or_path,
                lengths=[],
                rows_per_shard=_ROWS_PER_SHARD,
                machine=platform.node(),
                **layer_fields(layers),
            )
        if layers != self._manifest.layers:
            raise UserValueError(
                f"the drafter reads other layers of the target (`target_layer_ids`) than the folder holds: "
                f"{layer_fields(layers)}, not {layer_fields(self._manifest.layers)}. Record into another folder"
            )

    def _has_its_weights(self) -> bool:
        target = self._target()
        return target is None or model_fingerprint(target) == self._made_from["model"]

    def _add(self, call: RecordedCall) -> None:
        """Takes a call that has ended, and writes rows once they fill a shard."""
        with self._lock, self._giving_up():
            if self.is_running:
                self._calls.append(call)
                if sum(call.num_rows for call in self._calls) + len(self._rows) >= _ROWS_PER_SHARD:
                    self._check_calls()
                    self._read_calls()

    def _read_calls(self) -> None:
        """Reads the rows of calls that have ended, and writes all full shards."""
        calls, self._calls = self._calls, []
        for row in (row for call in calls for row in call.read_rows()):
            self._rows.append(row)
            self._made_from["num_rows"] += 1
            if len(self._rows) == _ROWS_PER_SHARD:
                self._write_shard()

    def _check_calls(self) -> None:
        """Drops calls of other weights: code that writes to `weight.data` counts no new version."""
        if self._calls and not self._has_its_weights():
            self._calls = []
            raise UserValueError(_CHANGED)

    def _write_shard(self) -> None:
        """Writes the newest shard, then that it exists, and deletes the oldest ones where the folder is full."""
        manifest, rows = self._manifest, self._rows
        if manifest is None or not rows:
            return
        self._rows = []
        manifest = replace(manifest, lengths=[*manifest.lengths, *(len(row["input_ids"]) for row in rows)])
        paths = manifest.shards(self.folder)
        save_shard(rows, paths[-1])
        sizes = [path.stat().st_size for path in paths]
        num_old = 0
        while sum(sizes[num_old:]) > self._max_bytes and num_old < len(sizes) - 1:
            num_old += 1
        lengths = manifest.lengths[num_old * _ROWS_PER_SHARD :]
        self._manifest = replace(manifest, lengths=lengths, first_shard=manifest.first_shard + num_old)
        what = {"dtype": manifest.dtype, **layer_fields(manifest.layers)}
        what["data"] = f"{self._made_from['num_rows']} rows of the recording {self._made_from['recording']}"
        Record(self.folder / MADE_FROM).write(self._made_from | what, is_finished=True)
        self._manifest.save(self.folder)
        for path in paths[:num_old]:
            path.unlink()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Ends a recording that fails within the block, whose error ends there."""
        try:
            yield
        except Exception as error:
            self._give_up(error)

    def _give_up(self, reason: Exception) -> None:
        """Ends the recording, and says why. Unless files cannot be written, what is read is written."""
        with self._lock:
            if not self.is_running:
                return
            with suppress(Exception):
                if not isinstance(reason, OSError) and os.getpid() == self._process:
                    self._write_shard()
            self._end()
        logger.warning(f"Recording into {str(self.folder)!r} has stopped, and generation goes on: {reason}.")

    def _end(self) -> None:
        self.is_running, self._calls, self._rows = False, [], []
        if (target := self._target()) is not None:
            observers = memory_of(target).observers
            if self._observe in observers:
                observers.remove(self._observe)
        self._writing.close()


def _versions(target: PreTrainedModel) -> list[Any]:
    """Returns what changes with the weights, unless these are written to as `weight.data`, and with adapters."""
    return [*adapters_of(target), *((tensor.data_ptr(), version_of(tensor)) for tensor in target.parameters())]
