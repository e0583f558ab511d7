"""From rows of conversations to rows of token ids."""
