"""Recording what a target generates: its states and tokens in a feature cache, to train a drafter on."""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..commands import UserValueError, as_user_errors
from ..generation.observers import GenerationObserver
from ..generation.verification.target_memory import memory_of
from ..generation.verification.target_states import TargetStates
from ..internals import version_of
from ..model.modeling_gumiho import GumihoModel
from ..model.wrappers import as_target
from .data.fingerprint import adapters_of, model_fingerprint, tokenizer_fingerprints
from .data.manifest import Manifest
from .data.run_files import sole_writer
from .data.target_runs import why_not_finite
from .feature_cache import CacheWriter, delete_unfit, layer_fields, layers_in, rows_of, shards_of, write_target


logger = logging.get_logger(__name__)

_ROWS_PER_SHARD = 16
_DTYPE = torch.bfloat16  # in which `gumiho train` keeps states, too
_MAX_ROW = 2048  # tokens; of a longer text, the parts that the target wrote are kept
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
        ValueError: `target` is none, it has no tokenizer, the folder was recorded from another target or with another
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
    inner = as_target(target)
    folder = Path(folder).absolute()  # wherever the program goes
    check_settings(max_gigabytes, share)
    name = inner.config.name_or_path
    try:
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise UserValueError(
            f"No tokenizer can be loaded from {name!r}, where the target comes from ({error}). Give `tokenizer`."
        ) from error
    return Recorder(inner, folder, tokenizer, max_gigabytes, share)


def check_settings(max_gigabytes: float, share: float) -> None:
    """Raises `ValueError` for a size or a share that is out of range."""
    if not (0 < share <= 1 and max_gigabytes > 0):
        raise UserValueError(
            f"`share` must be above 0 and at most 1, got {share}, and `max_gigabytes` above 0, got {max_gigabytes}."
        )


def record_once(target: PreTrainedModel, folder: str, **settings: float) -> None:
    """Begins to record a target in its first call. Where that fails, it warns once, and nothing is recorded."""
    memory = memory_of(target)
    if not memory.was_recorded:
        memory.was_recorded = True
        try:
            record(target, folder, **settings)
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
        self._calls: list[RecordedCall] = []  # that have ended, and are not written yet
        self._num_rows = 0  # of the shards that are or were there
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
        return sum(length for path in shards_of(self.folder) for _, length in rows_of(path))

    def stop(self) -> None:
        """Writes the rest, and ends the recording."""
        with self._lock:
            if self.is_running and os.getpid() == self._process:
                with self.giving_up():
                    self._write_calls()
                self._end()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def _open(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._manifest = Manifest(self.folder)
        if any(self.folder.iterdir()) and "recording" not in self._manifest.made_from:
            raise UserValueError(f"{str(self.folder)!r} holds something else than a recording. Name a new folder.")
        self._manifest.check(self._made_from, "Record into another folder.")
        self.folder.chmod(0o700)
        begun = {"recording": os.urandom(8).hex(), "target_name": target.config.name_or_path}
        self._made_from = begun | self._manifest.made_from | self._made_from
        self._manifest.write(self._made_from)
        delete_unfit(self.folder)
        write_target(target, tokenizer, self.folder)
        self._writer = CacheWriter(self.folder)
        if shards := shards_of(self.folder):
            self._num_rows = rows_of(shards[-1])[-1][0] + 1

    def _observe(self, drafter: GumihoModel) -> "RecordedCall | None":
        """Returns the observer of a call that begins, unless it is not to be recorded."""
        target = self._target()
        if target is None or (self._share < 1 and SystemRandom().random() >= self._share):
            return None
        with self._lock, self.giving_up():
            if not self.is_running:
                return None
            if os.getpid() != self._process:
                raise UserValueError("this is another process than the one that began it")
            if (versions := _versions(target)) != self._seen:
                if not self._has_its_weights():
                    self._write_calls(are_checked=True)  # which ended before that
                    raise UserValueError(_CHANGED)
                self._seen = versions
            layers = drafter.config.layers_read(target.config)
            if "dtype" not in self._made_from:  # the first call of the recording
                self._made_from |= {"dtype": str(_DTYPE).removeprefix("torch."), **layer_fields(layers)}
                self._manifest.write(self._made_from)
            if layers != (before := layers_in(self._made_from)):
                raise UserValueError(
                    f"the drafter reads other layers of the target (`target_layer_ids`) than the folder holds: "
                    f"{layer_fields(layers)}, not {layer_fields(before)}. Record into another folder"
                )
            num_layers = None if layers is None else len(layers.besides_last_states(target.config))
            return RecordedCall(self, num_layers, drafter.config.get_text_config().vocab_size)
        return None

    def _has_its_weights(self) -> bool:
        target = self._target()
        return target is None or model_fingerprint(target) == self._made_from["model"]

    def add(self, call: "RecordedCall") -> None:
        """Takes a call that has ended, and writes rows once they fill a shard."""
        with self._lock, self.giving_up():
            if self.is_running:
                self._calls.append(call)
                if sum(call.num_rows for call in self._calls) >= _ROWS_PER_SHARD:
                    self._write_calls()

    def _write_calls(self, are_checked: bool = False) -> None:
        """
        Writes the rows of calls that have ended into a shard, and deletes the oldest shards where the folder is full.
        Drops calls of other weights: code that writes to `weight.data` counts no new version.
        """
        calls, self._calls = self._calls, []
        if calls and not are_checked and not self._has_its_weights():
            raise UserValueError(_CHANGED)
        rows: dict[int, dict[str, torch.Tensor]] = {}
        try:
            for row in (row for call in calls for row in call.read_rows()):
                rows[self._num_rows + len(rows)] = row
        finally:
            if rows:
                self._writer.save(rows)
                self._num_rows += len(rows)
        shards = shards_of(self.folder)
        while len(shards) > 1 and sum(path.stat().st_size for path in shards) > self._max_bytes:
            shards.pop(0).unlink()

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Ends a recording that fails within the block, whose error ends there."""
        try:
            yield
        except Exception as error:
            self._give_up(error)

    def _give_up(self, reason: Exception) -> None:
        """Ends the recording, and says why. Unless files cannot be written, calls that have ended are written."""
        with self._lock:
            if not self.is_running:
                return
            with suppress(Exception):
                if not isinstance(reason, OSError) and os.getpid() == self._process:
                    self._write_calls()
            self._end()
        logger.warning(f"Recording into {str(self.folder)!r} has stopped, and generation goes on: {reason}.")

    def _end(self) -> None:
        self.is_running, self._calls = False, []
        if (target := self._target()) is not None:
            observers = memory_of(target).observers
            if self._observe in observers:
                observers.remove(self._observe)
        self._writing.close()


class RecordedCall(GenerationObserver):
    """
    A call of `generate()`, whose states are on their way to the host. Of the layers beside the last one, `num_layers`
    are kept, `None` for a drafter that reads the last one; tokens from `vocab_size` on mark images of a prompt. An
    error ends the recording instead of the call.
    """

    def __init__(self, recorder: "Recorder", num_layers: int | None, vocab_size: int):
        self._recorder, self._num_layers, self._vocab_size = recorder, num_layers, vocab_size
        self._states: list[tuple[dict[str, torch.Tensor], Sequence[int]]] = []  # of the prompt and of each cycle
        self._new_tokens: list[list[int]] = []

    @property
    def num_rows(self) -> int:
        """Texts of the batch."""
        return len(self._new_tokens)

    def on_prompt(self, input_ids: torch.Tensor, states: TargetStates, mask: torch.Tensor | None) -> None:
        """Keeps the prompt from where its states begin, or the end of it where it is long."""
        with self._recorder.giving_up():
            self._devices = {input_ids.device, states.last.device} - {torch.device("cpu")}
            num_known = min(states.last.shape[1], input_ids.shape[1], _MAX_ROW)
            self._prompt = _to_host(input_ids[:, input_ids.shape[1] - num_known :])
            self._mask = None if mask is None else _to_host(mask[:, mask.shape[1] - num_known :])
            self._keep(states.newest(num_known), [num_known] * len(input_ids))

    def on_states(self, states: TargetStates, counts: Sequence[int]) -> None:
        """Keeps the states of a cycle."""
        with self._recorder.giving_up():
            self._keep(states, counts)

    def on_generation_end(self, new_tokens: list[list[int]]) -> None:
        """Hands the call to the recorder."""
        with self._recorder.giving_up():
            if self._states:
                self._new_tokens = new_tokens
                self._recorder.add(self)

    def _keep(self, states: TargetStates, counts: Sequence[int]) -> None:
        kept = {"hidden_states": states.last}
        if self._num_layers is not None:
            kept["layer_states"] = states.target_states[..., : self._num_layers * states.last.shape[-1]]
        self._states.append(({name: _to_host(tensor.to(_DTYPE)) for name, tensor in kept.items()}, counts))

    def read_rows(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the rows of a feature cache: of each text, those parts in which the target wrote something."""
        for device in self._devices:
            torch.accelerator.synchronize(device)
        (of_prompt, _), *cycles = self._states
        for number, new in enumerate(self._new_tokens):
            is_text = torch.ones_like(self._prompt[number]) if self._mask is None else self._mask[number]
            prompt = self._prompt[number][is_text.bool()]
            states = {
                name: torch.cat([
                    of_prompt[name][number][is_text.bool()],
                    *(of_cycle[name][number, : counts[number]] for of_cycle, counts in cycles),
                ])
                for name in of_prompt
            }  # fmt: skip
            length = len(states["hidden_states"])  # the text's last token has no state
            ids = torch.tensor([*prompt.tolist(), *new][:length], dtype=torch.int32, device="cpu")
            ids = ids.clamp(max=self._vocab_size - 1)
            if not all(torch.isfinite(of_name).all() for of_name in states.values()):
                raise UserValueError(why_not_finite(_DTYPE))
            loss_mask = torch.zeros_like(ids)
            loss_mask[len(prompt) :] = 1
            # From the end, so that what the target wrote has as much as possible before it.
            for stop in range(length, 0, -_MAX_ROW):
                part = slice(max(stop - _MAX_ROW, 0), stop)
                loss_mask[stop - 1] = 0  # no token of the row follows
                if loss_mask[part].any():
                    yield {"input_ids": ids[part], "loss_mask": loss_mask[part]} | {
                        name: of_name[part] for name, of_name in states.items()
                    }


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy, which is only queued where it comes from a device."""
    return tensor.to("cpu", non_blocking=True, copy=True)


def _versions(target: PreTrainedModel) -> list[Any]:
    """Returns what changes with the weights, unless these are written to as `weight.data`, and with adapters."""
    return [*adapters_of(target), *((tensor.data_ptr(), version_of(tensor)) for tensor in target.parameters())]
