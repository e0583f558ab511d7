"""Letting a target write training data, in this process or behind a server."""
