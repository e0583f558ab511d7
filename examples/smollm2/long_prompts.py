"""Makes long questions out of a target's own answers: summarize them, or answer with their help.

    python examples/smollm2/long_prompts.py --answers examples/smollm2/answers.jsonl --output_file long_prompts.jsonl
    gumiho data --target target --data long_prompts.jsonl --output_file long.jsonl

A target that writes its own prompts seldom writes long ones. Here its earlier answers take the place of the documents
that people paste into a chat, so still no other data is needed. Answers that repeat themselves are left out.
"""

import json
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser


SUMMARIZE = [
    "Summarize: {text}",
    "Summarize the following text in a few sentences:\n\n{text}",
    "{text}\n\nWhat are the main points of this text?",
    "Give me a short summary.\n\n{text}",
    "Please read this and tell me in one paragraph what it says:\n\n{text}",
]
ANSWER = [
    "{text}\n{question}",
    "{text}\n\n{question}",
    "Use these passages to answer the question.\n\n{text}\n\nQuestion: {question}",
    "{question}\n\nHere is what I found:\n\n{text}",
]
MAX_QUESTION_WORDS = 30


@dataclass
class LongPromptArguments:
    answers: Path = field(metadata={"help": "JSONL of `messages`, as `gumiho data` writes it."})
    output_file: Path = field(metadata={"help": "The prompts, as JSONL."})
    num_prompts: int = 1000
    max_words: int = field(default=550, metadata={"help": "Words of the answers in a prompt, at most."})
    min_words: int = field(default=150, metadata={"help": "And at least."})
    max_repetition: float = field(default=2.6, metadata={"help": "How many times smaller an answer may be zipped."})
    seed: int = 0


def read_passages(args: LongPromptArguments) -> list[tuple[str, str]]:
    """Returns the prompts and answers that are fit to be quoted."""
    passages = []
    # Not `splitlines`, which also splits at characters that stand in JSON strings (U+2028).
    rows = [json.loads(line) for line in args.answers.read_text(encoding="utf-8").split("\n") if line.strip()]
    for messages in (row["messages"] for row in rows if "messages" in row):  # others are answers that failed
        prompt, answer = (message["content"] for message in messages[-2:])
        zipped = zlib.compress(answer.encode(), 9)
        if len(answer.split()) >= 40 and len(answer.encode()) <= args.max_repetition * len(zipped):
            passages.append((prompt, answer))
    return passages


def write_prompts(args: LongPromptArguments, passages: list[tuple[str, str]]) -> Iterator[str]:
    """Yields prompts that quote answers picked at random, every other one with the question of one of them."""
    source = random.Random(args.seed)
    for index in range(args.num_prompts):
        wanted = source.randint(args.min_words, args.max_words)
        picked: list[tuple[str, str]] = []
        while sum(len(answer.split()) for _, answer in picked) < wanted:
            picked.append(source.choice(passages))
        text = "\n\n".join(answer for _, answer in picked)
        text = "".join(re.findall(r"\s*\S+", text)[: args.max_words])
        questions = [prompt for prompt, _ in picked if len(prompt.split()) <= MAX_QUESTION_WORDS]
        if index % 2 and questions:
            yield source.choice(ANSWER).format(text=text, question=source.choice(questions))
        else:
            yield source.choice(SUMMARIZE).format(text=text)


def main() -> None:
    (args,) = HfArgumentParser(LongPromptArguments, description=__doc__).parse_args_into_dataclasses()
    passages = read_passages(args)
    if not passages:
        raise SystemExit(f"{args.answers} has no answers of 40 words that do not repeat themselves.")
    with args.output_file.open("w", encoding="utf-8") as file:
        for prompt in write_prompts(args, passages):
            file.write(json.dumps({"prompt": prompt}) + "\n")
    print(f"{args.num_prompts} prompts from {len(passages)} answers.")


if __name__ == "__main__":
    main()
