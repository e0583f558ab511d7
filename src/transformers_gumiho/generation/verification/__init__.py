"""What is known of a target, and how it runs: its requirements, output head, cache and passes."""
