"""Training data without data: a target writes its own users' prompts, and answers them."""
