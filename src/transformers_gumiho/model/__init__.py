"""The drafter as a `PreTrainedModel`: its config, its weights, and the files that go with them."""
