"""Pairs of a target and a drafter that have a short name, and where their files come from."""
