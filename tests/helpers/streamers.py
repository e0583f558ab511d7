"""A streamer that keeps what it is given."""

import torch
from transformers.generation.streamers import BaseStreamer


class Recorder(BaseStreamer):
    """
    Attributes:
        values: What it was given, call by call. The end of a text is an empty list.
    """

    def __init__(self) -> None:
        self.values: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.values.append([])

    @property
    def tokens(self) -> list[int]:
        return [token for value in self.values for token in value]
