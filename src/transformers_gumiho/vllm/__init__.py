"""Gumiho in vLLM. vLLM calls `transformers_gumiho_vllm`, which imports this package only if it is needed."""
