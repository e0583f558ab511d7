"""The commands that show, measure and tune."""
