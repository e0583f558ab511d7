"""
vLLM on a CPU without Triton: temperatures of speculative decoding are expanded into a copy. Seen with 0.31 and 0.32.

Expected: [0.5, 0.5, 0.5, 2.0]. Seen: other numbers, and so garbage in all texts of a batch with a sampled request.
"""

import torch
import vllm
from vllm.platforms import current_platform


current_platform.register_triton_kernel_overrides()
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens  # noqa: E402  (binds what was registered)


temperatures, ends = torch.tensor([0.5, 2.0]), torch.tensor([3, 4], dtype=torch.int32)
found = expand_batch_to_tokens(temperatures, ends, 4).tolist()
print(f"vLLM {vllm.__version__}: [0.5, 0.5, 0.5, 2.0] expected, found {found}")
