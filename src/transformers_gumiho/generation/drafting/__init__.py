"""Drafting a tree per cycle with a drafter."""
