"""Decodes with the drafter of this repository: `target.generate(..., custom_generate=<repository>)`."""

from transformers_gumiho.custom_generation import generate


__all__ = ["generate"]
