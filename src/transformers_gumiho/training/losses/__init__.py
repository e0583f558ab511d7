"""The training losses, term by term, and over a large vocabulary in chunks."""
