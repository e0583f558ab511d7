"""What is here runs where vLLM is installed (`make test-vllm`), and nowhere else."""

import importlib.util
import os


collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

# Before vLLM is imported: the engine in the tests' own process, where they can look into it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
