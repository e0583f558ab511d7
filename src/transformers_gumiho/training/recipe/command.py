"""`gumiho data` and `gumiho train`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from huggingface_hub import HfApi
from transformers.trainer import TRAINING_ARGS_NAME

from ...commands import UserValueError, as_user_errors, build, full_disk_told, make_folder, read_words
from ...model.mtp_checkpoint import OWN_MTP_LAYERS, has_mtp_layers
from ..arguments import GumihoTrainingArguments
from ..data.bars import without_other_bars
from ..data.manifest import differences_allowed
from ..data.run_files import sole_writer
from .arguments import DataArguments, check_training
from .options import read_options


if TYPE_CHECKING:
    from .stages import Measures


@contextmanager
def _continuing() -> Iterator[None]:
    """Says after Ctrl-C how to continue."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or "Interrupted. Run the same command again: it continues.") from None


@_continuing()
def run_data_command(words: Sequence[str]) -> None:
    """
    Lets a target answer questions, its own or those of a data set, and writes the conversations as JSONL. If you stop
    it, run it again with the same options, and it continues.
    """
    usage = "--target NAME --data FILE|DATASET|none --output_file FILE"
    given = read_words([DataArguments], "data", words, _summary(run_data_command), usage=usage)
    from .target import load_tokenizer, write_answers  # need the extra `train`, which `--help` does not

    without_other_bars()
    (args,) = build([DataArguments], given)
    args.check(given)
    write_answers(args, load_tokenizer(args), args.output_file, args.seed, tokens_per_pass=args.tokens_per_pass)


@_continuing()
def run_train_command(words: Sequence[str], measures: "Measures") -> None:
    """
    Makes a drafter for a target: the target writes its training data, its states are kept, the drafter is trained,
    tuned for this machine and compared with plain decoding. If you stop it, run it again with the same
    options, and it continues.

    The drafter goes into the output folder, and everything else into `work/` within it. `measures` does the stages
    `tune` and `evaluate`.
    """
    options = read_options(words, _summary(run_train_command))
    from .plan import plan_run  # these need the extra `train`, which `--help` does not
    from .stages import Run

    args, training_args = options.run, options.training
    without_other_bars()
    if args.drafter == OWN_MTP_LAYERS:
        args.drafter = _own_layers_of(args.target)
    args.check(options.given)
    folder = Path(training_args.output_dir)
    for number, phase in enumerate(options.phases.values()):
        check_training(args, phase, has_drafter=args.drafter is not None or number > 0)
    for name, model in (("target", args.target), ("drafter", args.drafter)):
        if model is not None and Path(model).resolve() == folder.resolve():
            raise UserValueError(
                f"The new drafter would replace the {name} in {str(folder)!r}. Name another folder with --output_dir."
            )
    if training_args.push_to_hub and not args.plan and training_args.process_index == 0:
        _push(folder, training_args, tries=True)  # without permission, it ends here rather than after the training
    make_folder(folder / "work")
    run = Run(options, folder, measures)
    alone = sole_writer(folder / "work") if run.is_main and not args.plan else nullcontext()
    with full_disk_told(folder), alone:
        if args.restart is not None and not args.plan:
            run.forget(args.restart)
        if args.plan or not run.has_begun:
            plan_run(run)
        if not args.plan:
            with differences_allowed(run.is_main) if args.force else nullcontext():
                run.run()
            if training_args.push_to_hub and run.is_main and any(folder.glob("*model*.safetensors")):
                _push(folder, training_args)
    PartialState().destroy_process_group()  # of several processes, of which one would complain otherwise


def _own_layers_of(target: str | None) -> str:
    if target is None or not has_mtp_layers(target, {}):
        raise UserValueError(
            f"--drafter mtp trains the MTP layer in the target's checkpoint, and {target!r} has none. Give a target "
            f"that has one, or the original model of this target as --drafter."
        )
    return target


def _push(folder: Path, args: GumihoTrainingArguments, tries: bool = False) -> None:
    """
    Uploads the drafter to the Hub, without what it was made from, and without the arguments, which hold a token. If it
    only `tries`, it makes the repository where it is new. Raises `OSError` without the permission.
    """
    api, name = HfApi(token=args.hub_token), args.hub_model_id or folder.resolve().name
    with as_user_errors():
        repository = api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
        api.auth_check(repository, write=True)  # a repository that exists raised no error above
        if tries:
            return
        api.upload_folder(
            repo_id=repository, folder_path=folder, revision=args.hub_revision,
            ignore_patterns=["work/*", TRAINING_ARGS_NAME], commit_message="A drafter of `gumiho train`",
        )  # fmt: skip
    sys.stdout.write(f"pushed to {repository}\n")


def _summary(command: Any) -> str:
    return " ".join((command.__doc__ or "").partition("\n\n")[0].split())
