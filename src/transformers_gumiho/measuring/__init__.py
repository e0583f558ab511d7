"""What benchmarking, tuning and presenting share: loading a pair, reading prompts, timing."""
