"""Gumiho inside vLLM; `transformers_gumiho_vllm` is what vLLM calls. Nothing here is imported without vLLM."""
