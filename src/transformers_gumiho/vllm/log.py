"""What the log of vLLM says of a drafter."""

from vllm.logger import init_logger

from .model import GumihoForCausalLM


# vLLM's handlers and level are those of its own loggers.
logger = init_logger("vllm.transformers_gumiho")


def log_drafter(drafter: GumihoForCausalLM) -> None:
    """Says that a Gumiho drafter drafts, and what."""
    chain = drafter.chain
    vocabulary = drafter.config.draft_vocabulary
    logger.info(
        "The Gumiho plug-in drafts: %d tokens per step (%d from the serial head, %d from parallel heads)%s.",
        chain.num_tokens,
        chain.num_serial_tokens,
        chain.num_heads,
        "" if vocabulary is None else f", of {len(vocabulary)} that may be drafted",
    )


__all__ = ["log_drafter"]
