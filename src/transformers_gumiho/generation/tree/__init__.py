"""Draft trees: building, masking, recombining and walking them. Plain tensors, without any model."""
