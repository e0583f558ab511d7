"""Says that a drafter is an `assistant_model`."""

from transformers_gumiho.custom_generation import generate


__all__ = ["generate"]
