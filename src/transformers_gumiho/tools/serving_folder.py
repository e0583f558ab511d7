"""`gumiho attach`: a folder of a target that drafts wherever it is loaded by its name."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download

from ..commands import REQUIRED, UserOSError, UserValueError, as_user_errors, make_folder, option
from ..files import check_folder, damaged_files_named
from ..model.configuration_gumiho import GumihoConfig
from ..model.loading import is_drafter
from ..model.mtp_checkpoint import OWN_MTP_LAYERS, has_mtp_layers
from ..training.data.open_text import load_tokenizer
from ..training.recording import check_settings


_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# What `from_pretrained` does not read: weights in other formats, and the state of a training.
_OTHER_FORMATS = ["*.pth", "*.pt", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite", "optimizer*"]
_OTHER_FOLDERS = ["original/*", "onnx/*"]
# Of a tokenizer.
_TEMPLATES = "additional_chat_templates"
_CODE = "custom_generate"
_GENERATE = '''"""Generates with an attached Gumiho drafter. Load this folder with `trust_remote_code=True`."""

from transformers_gumiho.custom_generation import generate_attached


def generate(*args, **kwargs):
    """As `generate()` of the target, with drafts where they are possible."""
    return generate_attached({drafter!r}, *args, {record}**kwargs)
'''


@dataclass
class AttachArguments:
    """The options of `gumiho attach`."""

    target: str = option("Target model: a folder or a name on the Hub. Both may be given by position.", REQUIRED)
    drafter: str = option("Gumiho drafter: a folder or a name on the Hub; `mtp`: the target's MTP layers.", REQUIRED)
    output_dir: str = option("Folder to write. It must be new or empty.", REQUIRED)
    record: str | None = option("Feature cache to record what is generated in, prompts included.")
    record_share: float = option("Share of the calls to record.", 1.0)
    record_max_gigabytes: float = option("Size of the recorded rows; the oldest are deleted to make room.", 10.0)
    copy_weights: bool = option("Copy the target's weights instead of linking them.", False)


def write_served_target(args: AttachArguments) -> str:
    """
    Writes a folder of the target that drafts wherever it is loaded, for clients that take no assistant. It holds the
    target's files and the code that attaches the drafter. Weights are linked; `args.copy_weights` copies them. Returns
    a sentence about what was done.

    Raises:
        ValueError: The drafter is none, the target is none that can be served or recorded, or the folder is not empty.
        OSError: The target or the drafter cannot be found.
    """
    check_folder(args.target)
    if args.drafter != OWN_MTP_LAYERS:
        check_folder(args.drafter, has_config=False)
    layers = args.target if args.drafter == OWN_MTP_LAYERS else args.drafter
    if not has_mtp_layers(layers, {}) and (args.drafter == OWN_MTP_LAYERS or not is_drafter(args.drafter)):
        raise UserValueError(f"{args.drafter!r} is not a Gumiho drafter. Give its folder or its name on the Hub.")
    folder = Path(args.output_dir)
    if folder.is_dir() and any(folder.iterdir()):
        raise UserValueError(f"The folder {args.output_dir!r} is not empty. Name a new one with --output_dir.")
    source = _find_target(args.target)
    _check_source(args.target, source)
    _check_vocabulary(layers, source)
    if args.record is not None:
        check_settings(args.record_max_gigabytes, args.record_share)
        load_tokenizer(str(source), None, None)  # which a recording needs
        if Path(args.record).is_file():
            raise UserValueError(f"{args.record!r} is a file. Name a folder with --record.")
    make_folder(folder / _CODE)
    with as_user_errors():
        for path in source.iterdir():
            if path.is_file() and not any(map(path.match, _OTHER_FORMATS)):
                if any(map(path.match, _WEIGHTS)) and not args.copy_weights:
                    (folder / path.name).symlink_to(path.resolve())
                else:
                    shutil.copy(path, folder / path.name)
        if (source / _TEMPLATES).is_dir():
            shutil.copytree(source / _TEMPLATES, folder / _TEMPLATES)
    drafter = args.drafter
    if drafter != OWN_MTP_LAYERS and os.path.isdir(drafter):
        drafter = os.path.abspath(drafter)
    record = ""
    if args.record is not None:
        settings = {"max_gigabytes": args.record_max_gigabytes, "share": args.record_share}
        record = f"record_in={os.path.abspath(args.record)!r}, recording={settings}, "
    (folder / _CODE / "requirements.txt").write_text("transformers-gumiho\n", encoding="utf-8")
    (folder / _CODE / "generate.py").write_text(_GENERATE.format(drafter=drafter, record=record), encoding="utf-8")
    how = "copied" if args.copy_weights else "linked"
    return f"{args.output_dir} drafts with {drafter}; the weights are {how}. Load it with trust_remote_code."


def _check_source(target: str, source: Path) -> None:
    """Raises `ValueError` for a target's folder beside whose files no code would be read."""
    if (source / "adapter_config.json").exists():
        raise UserValueError(
            f"{target!r} is an adapter. Save a merged model with `model.merge_and_unload().save_pretrained(folder)` "
            f"and give its folder, or give the base."
        )
    if (source / "config.json").exists() and is_drafter(source):
        raise UserValueError(f"{target!r} is a drafter, not a target. Give the model that it was trained for.")
    if (source / _CODE).exists():
        raise UserValueError(f"{target!r} already has a folder {_CODE!r}. Give a target without one.")
    if not any(any(source.glob(pattern)) for pattern in _WEIGHTS):
        raise UserValueError(f"{target!r} holds no weights ({', '.join(_WEIGHTS)}). Give a target that holds some.")


def _check_vocabulary(drafter: str, source: Path) -> None:
    """Raises `ValueError` for the drafter of another target, with which the folder would decode plainly."""
    with as_user_errors(), damaged_files_named(source):
        ours = GumihoConfig.from_pretrained(drafter).get_text_config().vocab_size
        fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    theirs = (fields.get("text_config") or fields).get("vocab_size", ours)
    if ours != theirs:
        raise UserValueError(
            f"The drafter {drafter!r} has a vocabulary of {ours}, and the target one of {theirs}. Give a drafter that "
            f"was trained for this target."
        )


def _find_target(name: str) -> Path:
    """Returns the folder of a target. A name on the Hub is downloaded."""
    if os.path.isdir(name):
        return Path(name)
    try:
        return Path(snapshot_download(name, ignore_patterns=[*_OTHER_FORMATS, *_OTHER_FOLDERS]))
    except (OSError, ValueError) as error:
        raise UserOSError(f"The target {name!r} is not a folder and cannot be downloaded: {error}") from error
