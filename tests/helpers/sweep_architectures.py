"""Tries decoding with a drafter on every causal language model type of transformers, with tiny random weights.

    python tests/helpers/sweep_architectures.py
    python tests/helpers/sweep_architectures.py --table
    python tests/helpers/sweep_architectures.py --model_types qwen3_5 llama4

Greedy texts of one prompt and of three padded ones must equal those of plain `generate()`, with drafts of which a part
is accepted. Each type runs in a process of its own, forked from one that has imported what all of them need, and is
killed at a time limit. An interrupted run continues where it stopped: types for which `--output` has a line of the
same version of transformers are not tried again.
"""

import json
import os
import re
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # some caches import it; the processes should not each do so
import transformers
import transformers.models.llama.modeling_llama
from partly_right_drafts import partly_right_drafts
from targets import make_prompts
from tiny_configs import VOCAB_SIZE, small_config
from transformers import AutoModelForCausalLM, HfArgumentParser, PreTrainedModel, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.verification.traits import TargetTraits
from transformers_gumiho.model.decoding_settings import NEVER_PAUSES


# In the order of the table.
VERDICTS = ("tree", "chain", "refused", "differs", "fails", "not built")
MAX_PARAMETERS = 100_000_000
LENGTHS = ([5], [4, 17, 9])


@dataclass
class SweepArguments:
    output: Path = field(default=Path("architectures.jsonl"), metadata={"help": "One line for each model type."})
    model_types: list[str] = field(default_factory=list, metadata={"help": "Try these again instead of all new ones."})
    limit: int = field(default=60, metadata={"help": "Seconds of computing time for each model type."})
    max_new_tokens: int = 24
    table: bool = field(default=False, metadata={"help": "Only print the table of what was tried."})


def build(model_type: str) -> PreTrainedModel:
    """Returns a tiny random target."""
    config = small_config(model_type)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"It would have {num_parameters} parameters.")
    torch.manual_seed(0)
    # The eager experts are the ones that know float64.
    target = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    with torch.no_grad():
        # The embedding of padding, which is an ordinary token here, would be zero, and what is made of it tie.
        target.get_input_embeddings().weight[0].normal_(std=0.4)
    settings = target.generation_config
    settings.use_cache, settings.pad_token_id = True, 0
    settings.bos_token_id = settings.eos_token_id = settings.forced_eos_token_id = None
    return target


def prompts(lengths: list[int]) -> dict[str, torch.Tensor]:
    return make_prompts(lengths, sum(lengths), VOCAB_SIZE)


def attempt(model_type: str, max_new_tokens: int) -> dict[str, Any]:
    """Returns the verdict on a model type, with the evidence for it."""
    try:
        target = build(model_type)
    except Exception as error:
        return {"verdict": "not built", "why": in_one_line(error)}
    class_name = type(target).__name__
    settings = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens}
    try:
        for lengths in LENGTHS:
            target.generate(**prompts(lengths), max_new_tokens=3)
    except Exception as error:
        why = f"plain `generate()` of the tiny model fails: {in_one_line(error)}"
        return {"class": class_name, "verdict": "not built", "why": why}
    try:
        verdict = compare(target, settings)
        if verdict["verdict"] == "differs":
            # Large random weights make much of the rounding of float32, above all where experts are chosen.
            in_float64 = compare(build(model_type).double(), settings)
            if in_float64["verdict"] != "differs":
                verdict = in_float64 | {"why": f"in float64; in float32 rounding decides ({verdict['why']})"}
        return {"class": class_name} | verdict
    except ValueError as error:
        return {"class": class_name, "verdict": "refused", "why": in_one_line(error)}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{in_one_line(error)} ({Path(place.filename).name}:{place.lineno})"
        return {"class": class_name, "verdict": "fails", "why": why}


def compare(target: PreTrainedModel, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the verdict on a target that plain decoding works for."""
    drafter = GumihoModel.from_target(target, intermediate_size=48).eval()
    drafter.generation_config.update(num_assistant_tokens=15, branching_factor=4, break_even=NEVER_PAUSES)
    kind = "chain" if TargetTraits.of(target).is_chain else "tree"
    shares, num_tokens, refusal = [], [], ""
    for lengths in LENGTHS:
        prompt = prompts(lengths)
        plain = target.generate(**prompt, **settings, do_sample=False)
        try:
            with partly_right_drafts(plain, prompt["input_ids"].shape[1], VOCAB_SIZE):
                drafted = target.generate(
                    **prompt, **settings, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
                )
        except ValueError as error:
            if len(lengths) == 1:
                raise
            refusal = in_one_line(error)
            continue
        if not torch.equal(drafted.sequences, plain):
            what = f"texts of prompts of {lengths} tokens"
            place = int((drafted.sequences != plain).any(dim=0).nonzero()[0]) - max(lengths)
            return {"verdict": "differs", "why": f"{kind}: {what} part at new token {place}"}
        # The last cycle of a row may end early.
        shares += [number - 1 for row in drafted.accepted_lengths for number in row[:-1] if number]
        num_tokens.append(len(plain[0, max(lengths) :].unique()))
    verdict = {"verdict": kind, "tau": round(1 + sum(shares) / len(shares), 2), "num_tokens": max(num_tokens)}
    return verdict | ({"why": f"padded batches are refused: {refusal}"} if refusal else {})


def in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {text}"


def in_own_process(function: Callable[..., dict[str, Any]], *args: Any, limit: int) -> dict[str, Any]:
    """
    Returns what `function` returns in a fork of this process, which is killed after `limit` seconds of computing, or
    ten times as many by the clock.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        os.write(writer, json.dumps(function(*args)).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    try:
        if not select.select([reader], [], [], 10 * limit)[0]:
            return {"verdict": "fails", "why": f"took longer than {10 * limit} s"}
        answer = b"".join(iter(lambda: os.read(reader, 65536), b""))
        return (
            json.loads(answer)
            if answer
            else {"verdict": "fails", "why": f"crashed, or computed for more than {limit} s"}
        )
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the newest record of each model type, of this version of transformers."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [record for line in lines if (record := json.loads(line))["transformers"] == transformers.__version__]
    return {record["model_type"]: record for record in records}


def table(records: dict[str, dict[str, Any]]) -> str:
    """Returns the records in Markdown, a row for each model type."""
    counts = ", ".join(
        f"{sum(record['verdict'] == verdict for record in records.values())} {verdict}" for verdict in VERDICTS
    )
    rows = sorted(records.values(), key=lambda record: (VERDICTS.index(record["verdict"]), record["model_type"]))
    lines = [
        f"transformers {transformers.__version__}, {len(rows)} model types: {counts}.",
        "",
        "| model type | | tau | note |",
        "|---|---|---|---|",
    ]
    for row in rows:
        note = shortened(row.get("why", ""), row.get("class", ""))
        lines.append(f"| `{row['model_type']}` | {row['verdict']} | {row.get('tau', '')} | {note} |")
    return "\n".join(lines)


def shortened(why: str, class_name: str) -> str:
    """Returns a message without what every message says, fit for a cell."""
    why = re.sub(r"\s*Generate without `assistant_model`\.?", "", why).replace("|", "\\|").replace("<", "&lt;")
    if class_name:
        why = re.sub(rf"\b{class_name}\b", "it", why)
    return why if len(why) <= 240 else f"{why[:237]}..."


def main() -> None:
    (args,) = HfArgumentParser(SweepArguments, description=__doc__).parse_args_into_dataclasses()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not args.table:
        # Threads of a parallel region would be missing in the forks.
        torch.set_num_threads(1)
        known = {} if args.model_types else read(args.output)
        for model_type in [
            name for name in args.model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in known
        ]:
            start = time.perf_counter()
            result = in_own_process(attempt, model_type, args.max_new_tokens, limit=args.limit)
            record = {"model_type": model_type, "transformers": transformers.__version__} | result
            record["seconds"] = round(time.perf_counter() - start, 1)
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{model_type}: {record['verdict']} {record.get('why', '')[:160]}", flush=True)
    print(table(read(args.output)))


if __name__ == "__main__":
    main()
