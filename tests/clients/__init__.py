"""Clients of `generate()`."""
