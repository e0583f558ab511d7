"""`gumiho generate`, `gumiho show` and `gumiho demo`."""

import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

from ...commands import UserOSError, UserValueError, as_user_errors
from ...model.modeling_gumiho import GumihoModel
from ...training.data.open_text import encode_turn
from ..measuring.prompts import read_prompts
from ..pairs import load_pair, settings_of
from .answer_svg import answer_svg
from .answering import Answer, logit_gap, stream_answer
from .arguments import DemoArguments, GenerateArguments, ShowArguments
from .cycles import Cycle, label_cycle
from .terminal import describe_answer, describe_comparison, draw_in_terminal, wants_colors, write_new_pieces
from .tree_svg import tree_svg


if TYPE_CHECKING:
    import gradio

Models = tuple[PreTrainedModel, PreTrainedTokenizerBase, GumihoModel]

# Of each way of decoding before the two are compared: what only first calls do counts for neither.
_WARM_UP_TOKENS = 8


def generate(args: GenerateArguments) -> list[Answer]:
    """
    Generates text for a prompt, or for every line that you type, and highlights accepted draft tokens. Below it stand
    the acceptance length tau and the speed. If the tokenizer has a chat template, the lines are a conversation;
    otherwise each line is a prompt. Ctrl-C ends an answer, Ctrl-D the conversation.

    Raises:
        KeyboardInterrupt: An answer to prompts of the options was interrupted.
        ValueError: Options contradict each other, a prompt has no tokens, or `args.output` is no .svg file.
    """
    if args.prompt is not None and args.prompts is not None:
        raise UserValueError("--prompt and --prompts cannot be given together. Leave one of them out.")
    _check_output(args.output)
    if args.output is not None and args.prompt is None:
        raise UserValueError("--output draws one answer. Give its --prompt.")
    conversations: list[Iterable[str]] = [_typed_lines() if args.prompt is None else [args.prompt]]
    if args.prompts is not None:
        conversations = [question.turns for question in read_prompts(args.prompts)]
    models = load_pair(args)
    tokenizer = models[1]
    answers: list[Answer] = []
    for lines in conversations:
        turns, texts = list[str](), list[str]()
        for line in lines:
            turns.append(line)
            prompt = _encode(tokenizer, turns, texts, args.system)
            answers.append(_answer(args, models, prompt, seed=args.seed + len(answers)))
            texts.append(tokenizer.decode(answers[-1].tokens, skip_special_tokens=True))
            if args.prompts is None and not tokenizer.chat_template:
                turns, texts = [], []
    return answers


def show(args: ShowArguments) -> Cycle:
    """
    Draws the draft tree of one verification cycle of a greedy text: each node with its probability, the accepted path
    and the bonus token. Returns the cycle.

    Raises:
        ValueError: The text ends before this cycle, or `args.output` is no .svg file.
    """
    _check_output(args.output)
    target, tokenizer, drafter = load_pair(args)
    prompt = _encode(tokenizer, [args.prompt], [])

    def stop() -> None:
        if len(answer.cycles) == args.step:
            raise KeyboardInterrupt

    answer = Answer(on_step=stop)
    # There is room for one more cycle, as paths near the end of a text are shorter, up to the target's last position.
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
    longest = 1 + max(settings_of(target, drafter).prompt_lookup_num_tokens, drafter.config.max_draft_depth)
    most = max(min((args.step + 1) * longest, positions - len(prompt)), 1)
    stream_answer(target, tokenizer, drafter, prompt, answer, max_new_tokens=most, temperature=0.0)
    if (num_cycles := len(answer.cycles)) < args.step:
        if answer.progress == "stopped":
            raise KeyboardInterrupt
        raise UserValueError(f"The text ends after {num_cycles} cycles, before --step {args.step}.")
    cycle = answer.cycles[-1]
    labels = label_cycle(tokenizer, [*prompt, *answer.tokens_before(args.step - 1)], cycle)
    drawn = draw_in_terminal(cycle, labels, colors=wants_colors(sys.stdout))
    sys.stdout.write(f"cycle {args.step}, {drawn}\n")
    if args.output is not None:
        _draw_into(args.output, tree_svg(cycle, labels, is_alone=True) + "\n")
    return cycle


def _check_output(output: str | None) -> None:
    if output is not None and Path(output).suffix != ".svg":
        raise UserValueError(f"A picture is drawn into an .svg file, got --output {output}. Change its ending.")


def _draw_into(output: str, svg: str) -> None:
    with as_user_errors():
        Path(output).write_text(svg, encoding="utf-8")
    sys.stdout.write(f"\ndrawn into {output}\n")


def demo(args: DemoArguments) -> None:
    """
    Opens a web page that answers a question twice, side by side: plainly and with the drafter. It highlights accepted
    drafts, counts tau and the speed, and draws the newest draft tree. Ctrl-C ends it.

    Raises:
        OSError: Nothing can listen on the host and port.
    """
    # Gradio would try for minutes, after the models are loaded.
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        socket.create_server((args.host.strip("[]"), args.port or 0), family=family).close()
    except (OSError, OverflowError) as error:
        address = f"--host {args.host}{f' --port {args.port}' if args.port else ''}"
        raise UserOSError(f"Nothing can listen on {address}: {error}. Give a free one of this machine.") from error
    page = make_page(args)
    with as_user_errors():  # the port may be taken by now
        # Quiet, because Gradio would advertise public links.
        _, address, _ = page.launch(
            server_name=args.host, server_port=args.port, ssr_mode=False, prevent_thread_lock=True, quiet=True
        )
    sys.stdout.write(f"Open {address} in a browser. Ctrl-C ends the page.\n")
    sys.stdout.flush()
    try:
        while True:  # Gradio's own loop would swallow Ctrl-C
            time.sleep(1)
    finally:
        page.close()


def make_page(args: DemoArguments) -> "gradio.Blocks":
    """Returns the page of [`demo`], for a Space or a program of yours; its `launch()` opens it."""
    # Only the page needs Gradio; whoever lacks it should not wait for the models first.
    from .web.page import Page

    logging.disable_progress_bar()
    return Page(*load_pair(args), args)


def _answer(args: GenerateArguments, models: Models, prompt: list[int], seed: int) -> Answer:
    """Writes the answer to a prompt, and plain decoding's below it to compare."""
    target, tokenizer, drafter = models
    colors = wants_colors(sys.stdout)

    def answer_with(assistant: GumihoModel | None, max_new_tokens: int, is_shown: bool = True) -> Answer:
        answer = Answer()
        if is_shown:
            answer.on_step = write_new_pieces(answer, sys.stdout, colors)
        torch.manual_seed(seed)
        stream_answer(
            target, tokenizer, assistant, prompt, answer, max_new_tokens=max_new_tokens, temperature=args.temperature
        )
        answer.on_step()  # the end of a text that was interrupted
        return answer

    if args.compare:
        for assistant in (drafter, None):
            answer_with(assistant, min(_WARM_UP_TOKENS, args.max_new_tokens), is_shown=False)
    answer = answer_with(drafter, args.max_new_tokens)
    is_stopped = answer.progress == "stopped"
    sys.stdout.write(f"\n\n{describe_answer(answer, target.dtype, colors)}\n")
    if args.output is not None:
        _draw_into(args.output, answer_svg(answer, args.prompt))
    if args.compare and answer.progress == "done":
        sys.stdout.write("\n")
        plain = answer_with(None, args.max_new_tokens)
        gap = None if args.temperature else logit_gap(target, prompt, answer, plain)
        sys.stdout.write(f"\n\n{describe_comparison(answer, plain, target.dtype, gap)}\n")
        is_stopped = plain.progress == "stopped"
    if is_stopped and (args.prompt or args.prompts):  # otherwise the next line is typed
        raise KeyboardInterrupt
    return answer


def _encode(
    tokenizer: PreTrainedTokenizerBase, turns: list[str], texts: list[str], system: str | None = None
) -> list[int]:
    # Bytes of another encoding than the terminal's arrive as characters that no tokenizer reads.
    turns = [turn.encode(errors="surrogateescape").decode(errors="replace") for turn in turns]
    prompt = encode_turn(tokenizer, turns, texts, system)
    if not prompt:
        raise UserValueError("The prompt has no tokens. Give a longer --prompt.")
    return prompt


def _typed_lines() -> Iterator[str]:
    """Yields the lines that are typed, or that standard input has; empty ones are left out."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):  # gives `input` its editing keys, where there is one
            import readline  # noqa: F401
        sys.stdout.write("Type a prompt. Ctrl-C ends an answer, Ctrl-D ends the program.\n")
    with suppress(EOFError), as_user_errors():
        while True:
            line = input("> " if is_terminal else "")
            if line.strip():
                yield line
    sys.stdout.write("\n")
