"""What benchmarking, tuning and presenting share: reading prompts, and timing."""
