"""Where the trees of a generation come from."""

from transformers_gumiho.generation.drafting.candidate_generator import DraftOrigin
from transformers_gumiho.generation.observers import GenerationObserver


class Origins(GenerationObserver):
    """Keeps where each tree comes from."""

    def __init__(self) -> None:
        self.seen: list[DraftOrigin] = []

    def on_tree(self, origin: DraftOrigin) -> None:
        self.seen.append(origin)

    @property
    def sources(self) -> list[str]:
        return [origin.source for origin in self.seen]
