"""`gumiho data` and `gumiho train`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from huggingface_hub import HfApi
from transformers.trainer import TRAINING_ARGS_NAME

from ...commands import UserValueError, as_user_errors, full_disk_told, make_folder
from ...model.mtp_checkpoint import OWN_MTP_LAYERS, has_mtp_layers
from ..arguments import GumihoTrainingArguments
from ..data.bars import without_other_bars
from ..data.manifest import differences_allowed
from ..data.run_files import sole_writer
from .arguments import DataArguments, RecipeArguments, check_training, parse
from .defaults import device_defaults, learning_rates
from .idle_options import check_idle
from .recipes import RECIPES


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
    (args,) = parse([DataArguments], "data", words, {}, _summary(run_data_command))
    from .writing import load_tokenizer, write_answers  # need the extra `train`, which `--help` does not

    without_other_bars()
    check_idle(args, words)
    args.check()
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
    args, training_args = _parse(words, {})
    from .stages import Run  # needs the extra `train`, which `--help` does not

    without_other_bars()
    check_idle(args, words)
    if args.drafter == OWN_MTP_LAYERS:
        args.drafter = _own_layers_of(args.target)
    args.check()
    if args.packing is None:
        args.packing = RECIPES[args.recipe].packing
    phases, folder = phases_of(words, args, training_args), Path(training_args.output_dir)
    for number, phase in enumerate(phases.values()):
        check_training(args, phase, has_drafter=args.drafter is not None or number > 0)
    for name, model in (("target", args.target), ("drafter", args.drafter)):
        if model is not None and Path(model).resolve() == folder.resolve():
            raise UserValueError(
                f"The new drafter would replace the {name} in {str(folder)!r}. Name another folder with --output_dir."
            )
    if training_args.push_to_hub and not args.plan and training_args.process_index == 0:
        _repository(folder, training_args)  # without permission, it ends here rather than after the training
    make_folder(folder / "work")
    run = Run(args, phases, folder, measures, partial(learning_rates, words))
    alone = sole_writer(folder / "work") if run.is_main and not args.plan else nullcontext()
    with full_disk_told(folder), alone:
        if args.restart is not None and not args.plan:
            run.forget(args.restart)
        if args.plan or not run.has_begun:
            run.plan()
        if not args.plan:
            with differences_allowed(run.is_main) if args.force else nullcontext():
                run.run()
            if training_args.push_to_hub and run.is_main and any(folder.glob("*model*.safetensors")):
                _push(folder, training_args)
    PartialState().destroy_process_group()  # of several processes, of which one would complain otherwise


def _own_layers_of(target: str | None) -> str:
    """Returns the name of a drafter for `--drafter mtp`: the target's."""
    if target is None or not has_mtp_layers(target, {}):
        raise UserValueError(
            f"--drafter mtp trains the MTP layer in the target's checkpoint, and {target!r} has none. Give a target "
            f"that has one, or the original model of this target as --drafter."
        )
    return target


def phases_of(
    words: Sequence[str], args: RecipeArguments, training_args: GumihoTrainingArguments
) -> dict[str, GumihoTrainingArguments]:
    """
    Returns the trainings of a command line. One that names a drafter or a part of it asks for a single training;
    otherwise they are the recipe's phases, each with the options that are given.
    """
    recipe, part = RECIPES[args.recipe], training_args.train_only
    phases = recipe.phases
    if args.drafter is not None or part is not None:
        adds_heads = args.num_parallel_heads is not None
        options = recipe.further if part is None and not adds_heads else {}
        if adds_heads and part == "parallel":
            # New heads learn as in the recipe's phase for them.
            options = next((found for found in phases.values() if found.get("train_only") == part), {})
        phases = {"train": options}
    by_rows = training_args.tokens_per_step is None and not args.packing
    order = {"train_sampling_strategy": "group_by_length"} if by_rows else {}
    found = {}
    for name, options in phases.items():
        folder = str(Path(training_args.output_dir) / "work" / name)
        # The finished drafter alone is pushed.
        found[name] = _parse([*words, "--output_dir", folder, "--push_to_hub", "false"], order | options)[1]
    return found


def _repository(folder: Path, args: GumihoTrainingArguments) -> str:
    """Returns the name of the drafter's repository, made if it is new; raises `OSError` without the permission."""
    api, name = HfApi(token=args.hub_token), args.hub_model_id or folder.resolve().name
    with as_user_errors():
        repository = api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
        api.auth_check(repository, write=True)  # a repository that exists raised no error above
    return repository


def _push(folder: Path, args: GumihoTrainingArguments) -> None:
    """Uploads the drafter to the Hub, without what it was made from, and without the arguments, which hold a token."""
    with as_user_errors():
        repository = _repository(folder, args)
        HfApi(token=args.hub_token).upload_folder(
            repo_id=repository, folder_path=folder, revision=args.hub_revision,
            ignore_patterns=["work/*", TRAINING_ARGS_NAME], commit_message="A drafter of `gumiho train`",
        )  # fmt: skip
    sys.stdout.write(f"pushed to {repository}\n")


def _parse(words: Sequence[str], defaults: dict[str, Any]) -> list[Any]:
    """Returns the options: those given, then those of the device, then `defaults`, the recipe's."""
    defaults = defaults | device_defaults(words)
    return parse([RecipeArguments, GumihoTrainingArguments], "train", words, defaults, _summary(run_train_command))


def _summary(command: Any) -> str:
    return " ".join((command.__doc__ or "").partition("\n\n")[0].split())
