"""Compares two bodies below the serial head of a drafter: Gumiho's MLP heads, and one block of layers.

    python benchmarks/compare_bodies.py --pair demo --work_dir bodies_demo --stage rows
    python benchmarks/compare_bodies.py --pair demo --work_dir bodies_demo --stage train --body mlp
    python benchmarks/compare_bodies.py --pair demo --work_dir bodies_demo --stage train --body block
    python benchmarks/compare_bodies.py --pair demo --work_dir bodies_demo --stage measure

Both bodies have the same serial head (depths 1 and 2), transitions, parameters, rows, steps, losses and learning rate.
The block is a body of DSpark (anchor first) in small: its queries are the newest serial token of a path and a learned
vector for each later depth. They see each other, the path, and what the serial head has read of the text. The real
`generate()` builds and verifies the trees of both: the block takes the place of the module `mlp`.

The demo pair's drafters are trained from scratch, SmolLM2's on the serial head of `examples/smollm2/gumiho`, frozen.
"""

import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_body import BlockGumiho, count
from demo_pair import parse
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.observers import GenerationObserver, Stage, observing
from transformers_gumiho.model.decoding_settings import NEVER_PAUSES
from transformers_gumiho.tools.measuring.timing import temporary_settings
from transformers_gumiho.tools.pairs.smollm2 import find_target
from transformers_gumiho.training.data.open_text import encode_turn
from transformers_gumiho.training.losses.terms import LMHead, Readout, smooth_l1, soft_cross_entropy
from transformers_gumiho.training.target_features import OnlineFeatures
from transformers_gumiho.training.unrolling import unroll_serial_head


EXAMPLES = Path(__file__).parent.parent / "examples"
# Tokens of a row that are not drafted for: the prompt of the demo pair's rows.
DEMO_PROMPT, MAX_TOKENS = 64, 256
# A batch of training: names of tensors `(B, T, ...)`, padded on the right, and the lists `first` and `length`.
Batch = dict[str, Any]
# Nodes of a tree, and the tokens kept at each serial step.
BRANCHING = {"demo": {12: 2, 63: 14}, "smollm2": {12: 4, 63: 8}}


@dataclass(kw_only=True)
class BodiesArguments:
    pair: str = field(metadata={"help": "demo or smollm2."})
    stage: str = field(metadata={"help": "rows, train or measure."})
    body: str = field(default="mlp", metadata={"help": "What to train: mlp or block."})
    work_dir: Path = field(default=Path("bodies"), metadata={"help": "Rows, checkpoints and results."})
    num_layers: int = field(default=2, metadata={"help": "Layers of the block."})
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Width of the MLPs in these layers (default: for as many parameters)."}
    )
    num_rows: int = field(default=1536, metadata={"help": "Rows, held-out ones included."})
    num_held_out: int = 64
    steps: int = 736
    batch_size: int = 8
    num_positions: int = field(default=48, metadata={"help": "Random positions of a row that are trained on."})
    learning_rate: float = 2e-3
    num_prompts: int = 16
    max_new_tokens: int = 128
    temperatures: list[float] = field(default_factory=lambda: [0.3, 2 / 3])
    seed: int = 0

    @property
    def is_frozen(self) -> bool:
        """Whether the serial head is one that was trained before."""
        return self.pair == "smollm2"


def load_target(args: BodiesArguments, dtype: str) -> PreTrainedModel:
    folder = find_target() if args.is_frozen else EXAMPLES / "demo_pair" / "target"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)


def make_drafter(args: BodiesArguments, body: str, target: PreTrainedModel) -> GumihoModel:
    """Returns an untrained drafter in float32; with a serial head that was trained before if that is frozen."""
    torch.manual_seed(args.seed)
    shipped = GumihoModel.from_pretrained(EXAMPLES / f"{args.pair}{'_pair' * (not args.is_frozen)}" / "gumiho")
    config = copy.deepcopy(shipped.config)
    drafter = GumihoModel(config) if body == "mlp" else BlockGumiho(config, args.num_layers, args.intermediate_size)
    drafter = drafter.float()
    drafter.adopt_embedding(target.get_input_embeddings().weight.detach().float())
    drafter.embed_tokens.requires_grad_(False)
    if args.is_frozen:
        is_lower = ("mlp.", "transition.", "embed_tokens.")
        weights = {name: value for name, value in shipped.state_dict().items() if not name.startswith(is_lower)}
        drafter.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.startswith(is_lower[:2]))
    drafter.generation_config.update(break_even=NEVER_PAUSES, prompt_lookup_num_tokens=0, tree_depth=7)
    if args.is_frozen:
        drafter.generation_config.draft_vocabulary = shipped.generation_config.draft_vocabulary
    return drafter


def write_rows(args: BodiesArguments) -> list[tuple[list[int], int]]:
    """Returns the token ids of texts that the target wrote, and where each answer begins."""
    if args.is_frozen:
        tokenizer, rows = AutoTokenizer.from_pretrained(find_target()), []
        for line in (EXAMPLES / "smollm2" / "answers.jsonl").read_text(encoding="utf-8").splitlines():
            question, answer = (message["content"] for message in json.loads(line)["messages"][:2])
            prompt = encode_turn(tokenizer, [question], [])
            ids = (prompt + tokenizer(answer)["input_ids"])[:MAX_TOKENS]
            if len(ids) >= len(prompt) + args.num_positions + 8:
                rows.append((ids, len(prompt)))
        order = np.random.default_rng(args.seed).permutation(len(rows))
        return [rows[index] for index in order[: args.num_rows]]
    sys.path.insert(0, str(EXAMPLES / "demo_pair"))
    import stdlib_corpus as corpus  # type: ignore[import-not-found]
    from train_demo_pair import DemoPairArguments, generate_rows  # type: ignore[import-not-found]

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "demo_pair" / "target")
    texts = [text for name, text in corpus.read_library().items() if not corpus.is_held_out(name)]
    options = DemoPairArguments(generated_rows=args.num_rows, work_dir=args.work_dir, seed=args.seed)
    written = generate_rows(options, load_target(args, "float32"), corpus.encode_texts(tokenizer, texts))
    # Batches were written greedily and by sampling in turn.
    order = np.random.default_rng(args.seed).permutation(len(written))
    return [(written[index].tolist(), DEMO_PROMPT) for index in order]


@torch.no_grad()
def read_rows(args: BodiesArguments) -> None:
    """Saves each row with the target's states, or with what a frozen serial head makes of them."""
    target = load_target(args, "bfloat16")
    drafter = make_drafter(args, "mlp", target)
    features = OnlineFeatures(target, drafter.config.layers_read(target.config))
    rows: list[Batch] = []
    for number, (ids, first) in enumerate(write_rows(args)):
        tokens = torch.tensor(ids)[None]
        states = features.states({"input_ids": tokens})
        row: Batch = {"ids": tokens[0], "last": states.last[0], "states": states.target_states[0]}
        if args.is_frozen and number >= args.num_held_out:
            fused, paths, _ = run_serial_part(drafter, {"ids": tokens, "states": states.target_states})
            del row["states"]
            row |= {"fused": fused[0].bfloat16(), "paths": paths[0].bfloat16()}
        rows.append(row | {"first": first, "length": len(ids)})
    torch.save(rows, args.work_dir / "rows.pt")
    print(f"{len(rows)} rows, {sum(row['length'] for row in rows):,} tokens", flush=True)


def collate(rows: list[Batch]) -> Batch:
    tensors = [name for name in rows[0] if isinstance(rows[0][name], torch.Tensor)]
    batch: Batch = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in tensors}
    return batch | {name: [row[name] for row in rows] for name in ("first", "length")}


def choose_positions(batch: Batch, count: int, generator: torch.Generator, depth: int) -> torch.Tensor:
    """Returns positions `(B, count)` after which the next `depth` states of each answer are drafted."""
    chosen = []
    for first, length in zip(batch["first"], batch["length"], strict=True):
        # The first token of an answer is the target's. The draft at its position is of the token after it.
        choices = torch.arange(first - 1, length - depth)
        chosen.append(choices[torch.randperm(len(choices), generator=generator)[:count]])
    return torch.stack(chosen)


def run_serial_part(drafter: GumihoModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Returns the serial head's inputs `(B, T, H)`, those of paths `(B, T - S, S * H)`, and the serial features."""
    tokens, states = batch["ids"][:, 1:], batch["states"][:, :-1].float()
    fused = drafter.fuse(tokens, drafter.read_target(states))
    first, unrolled, paths = unroll_serial_head(drafter, tokens, fused, None, None)
    return fused, paths, [first, *unrolled]


def pick(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns entries `(B, n, ...)` of `(B, T, ...)` at positions `(B, n)`."""
    return states[torch.arange(len(states))[:, None], positions]


def predict(drafter: GumihoModel, batch: Batch, bases: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Returns the features `(B, n, H)` of each depth after `bases` `(B, n)`, and the first of these depths."""
    serial: list[torch.Tensor] = []
    if "fused" in batch:
        fused, paths = batch["fused"].float(), batch["paths"].float()
    else:
        fused, paths, serial = run_serial_part(drafter, batch)
    inputs, num_serial = pick(paths, bases), drafter.config.num_serial_tokens
    is_block = isinstance(drafter, BlockGumiho)
    lower = drafter.mlp.forward_text(inputs, bases, fused) if is_block else drafter.mlp(inputs)
    features = [pick(states, bases) for states in serial]
    for head, transition in enumerate(drafter.transition or ()):
        above = drafter.embed_tokens(pick(batch["ids"], bases + 1 + num_serial + head))
        features.append(lower[:, head] + transition(above))
    return features, 1 if serial else 1 + num_serial


def train(args: BodiesArguments) -> None:
    target = load_target(args, "bfloat16")
    drafter = make_drafter(args, args.body, target).train()
    head, _ = drafting_head(drafter, target)
    rows = torch.load(args.work_dir / "rows.pt")
    held_out, rows = rows[: args.num_held_out], rows[args.num_held_out :]
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = max(args.steps // 25, 1)

    def factor(step: int) -> float:
        return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    generator = torch.Generator().manual_seed(args.seed)
    depth, begin = drafter.config.max_draft_depth, (time.process_time(), time.perf_counter())
    batches = batches_of(rows, args.batch_size, args.steps, args.seed)
    for step, batch in enumerate(batches, 1):
        bases = choose_positions(batch, args.num_positions, generator, depth)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, first = predict(drafter, batch, bases)
            losses = []
            for offset, own in enumerate(found, first):
                goal = Readout(pick(batch["last"], bases + offset).flatten(0, 1), head)
                guess = Readout(own.flatten(0, 1), head)
                terms = soft_cross_entropy(guess, goal).mean() + smooth_l1(guess, goal).mean()
                losses.append(terms * math.exp((1 - offset) / 4))
            loss = torch.stack(losses).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            cpu, wall = time.process_time() - begin[0], time.perf_counter() - begin[1]
            print(f"step {step}: loss {loss.item():.3f}, {cpu / step:.2f} s of CPU, {wall / step:.2f} s", flush=True)
        if step % 100 == 0 or step == args.steps:
            shares = agreement(drafter.eval(), held_out, target, args)
            drafter.train()
            print(f"step {step}: agreement {' '.join(f'{share:.3f}' for share in shares)}", flush=True)
            torch.save(drafter.state_dict(), args.work_dir / f"{args.body}.pt")
    num_trained, cpu = sum(parameter.numel() for parameter in trained), time.process_time() - begin[0]
    print(f"{num_trained:,} trained parameters, {count(drafter.mlp):,} of the body; {cpu:.0f} s of CPU")


def batches_of(rows: list[Batch], size: int, steps: int, seed: int) -> Iterator[Batch]:
    """Returns batches of rows, each epoch in another order."""
    generator, order = np.random.default_rng(seed), []
    for _ in range(steps):
        if len(order) < size:
            order = generator.permutation(len(rows)).tolist()
        yield collate([rows[order.pop()] for _ in range(size)])


def drafting_head(drafter: GumihoModel, target: PreTrainedModel) -> tuple[LMHead, torch.Tensor]:
    """Returns the output head of the tokens that may be drafted, and their ids `(K,)`."""
    ids = getattr(drafter.generation_config, "draft_vocabulary", None)
    ids = torch.arange(drafter.config.get_text_config().vocab_size) if ids is None else torch.tensor(ids)
    return OnlineFeatures(target).restricted_to(ids).lm_head(torch.zeros((), dtype=target.dtype)), ids


@torch.no_grad()
def agreement(drafter: GumihoModel, rows: list[Batch], target: PreTrainedModel, args: BodiesArguments) -> list[float]:
    """Returns how often the best token of each depth is the target's, where those above it are the text's."""
    target_head = OnlineFeatures(target).lm_head(torch.zeros((), dtype=target.dtype))
    head, ids = drafting_head(drafter, target)
    generator, depth = torch.Generator().manual_seed(args.seed), drafter.config.max_draft_depth
    right, total = [0] * depth, 0
    for start in range(0, len(rows), args.batch_size):
        batch = collate(rows[start : start + args.batch_size])
        bases = choose_positions(batch, args.num_positions, generator, depth)
        total += bases.numel()
        for offset, own in enumerate(predict(drafter, batch, bases)[0], 1):
            goal = target_head(pick(batch["last"], bases + offset)).argmax(-1)
            right[offset - 1] += int((ids[head(own).argmax(-1)] == goal).sum())
    return [number / total for number in right]


class CycleClock(GenerationObserver):
    """
    The seconds of CPU of each cycle but the first of a text: all of it, drafting, the serial head's two passes, and
    the pass of the body below it.
    """

    # A draft runs these modules: fc and the serial head on what was committed, output head; fc and the serial head on
    # the first drafts, output head; fc, the body, output head.
    NUM_PASSES, SERIAL, BODY = 9, (1, 4), 7

    def __init__(self) -> None:
        self.cycles: list[tuple[float, ...]] = []

    def on_generation_begin(self, batch_size: int) -> None:
        self._begins: list[float] = []  # of cycles
        self._passes: list[float] = []

    def on_stage_begin(self, stage: Stage) -> None:
        now = time.process_time()
        if stage == "draft":
            if len(self._begins) > 1 and len(self._passes) == self.NUM_PASSES:
                serial = sum(self._passes[index] for index in self.SERIAL)
                self.cycles.append((now - self._begins[-1], self._drafted, serial, self._passes[self.BODY]))
            self._begins.append(now)
            self._passes = []
        self._pass_begin = now

    def on_stage_end(self, stage: Stage) -> None:
        now = time.process_time()
        if stage == "draft":
            self._drafted = now - self._begins[-1]
        if stage == "drafter_pass":
            self._passes.append(now - self._pass_begin)

    def medians(self) -> list[float]:
        """Returns the medians in milliseconds."""
        return [1e3 * statistics.median(column) for column in zip(*self.cycles, strict=True)]


def read_prompts(args: BodiesArguments) -> list[torch.Tensor]:
    """Returns the token ids `(1, T)` of prompts that were not trained on."""
    folder = EXAMPLES / ("smollm2" if args.is_frozen else "demo_pair")
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[: args.num_prompts]
    if args.is_frozen:
        tokenizer = AutoTokenizer.from_pretrained(find_target())
        return [torch.tensor([encode_turn(tokenizer, [json.loads(line)["prompt"]], [])]) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    return [tokenizer(json.loads(line)["text"], return_tensors="pt").input_ids for line in lines]


@torch.no_grad()
def measure(args: BodiesArguments) -> None:
    target = load_target(args, "float32")
    drafters = {}
    for body in ("mlp", "block"):
        drafters[body] = make_drafter(args, body, target)
        drafters[body].load_state_dict(torch.load(args.work_dir / f"{body}.pt"), strict=False)
        drafters[body].eval()
    trees = [
        {"num_assistant_tokens": nodes, "branching_factor": branching, "draft_temperature": temperature}
        for nodes, branching in BRANCHING[args.pair].items()
        for temperature in args.temperatures
    ]
    trees.append(trees[0] | {"tree_depth": drafters["mlp"].config.num_serial_tokens})
    settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    clocks = {(body, index): CycleClock() for body in drafters for index in range(len(trees))}
    lengths: dict[Any, list[int]] = {key: [] for key in clocks}
    steps = []
    for prompt in read_prompts(args):
        inputs, begin = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, time.process_time()
        plain = target.generate(**inputs, **settings)
        steps.append((time.process_time() - begin) / (plain.shape[1] - prompt.shape[1]))
        for (body, index), clock in clocks.items():
            drafter = drafters[body]
            with temporary_settings(drafter, trees[index]), observing(clock):
                output = target.generate(**inputs, **settings, assistant_model=drafter, return_dict_in_generate=True)
            if not output.sequences.equal(plain):
                raise AssertionError(f"{body} with {trees[index]} wrote another text than plain decoding.")
            origins = zip(output.accepted_lengths[0], output.draft_origins, strict=True)
            lengths[body, index] += [length for length, origin in origins if origin == "drafter"]
    print(f"{len(steps)} texts, all equal to plain decoding's; plain step {1e3 * statistics.median(steps):.1f} ms")
    print("| nodes | temperature | depth | body | tau | cycle | draft | serial passes | body's pass |\n|" + 9 * "---|")
    for (body, index), clock in sorted(clocks.items(), key=lambda item: item[0][1]):
        tree, own = trees[index], lengths[body, index]
        times = " | ".join(f"{value:.1f} ms" for value in clock.medians()) if clock.cycles else " | | |"
        shape = f"{tree['num_assistant_tokens']} | {tree['draft_temperature']:.2f} | {tree.get('tree_depth', 7)}"
        print(f"| {shape} | {body} | {sum(own) / len(own):.2f} | {times} |", flush=True)


def main() -> None:
    args = parse(BodiesArguments, __doc__)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    {"rows": read_rows, "train": train, "measure": measure}[args.stage](args)


if __name__ == "__main__":
    main()
