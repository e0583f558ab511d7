"""A released drafter in its full size, loaded by its name from a repository that has weights only."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import reference_shapes
from hub_cache import write_to_hub_cache


REPO = "amd/Gumiho-vicuna-7b"
SHAPES = reference_shapes(hidden=4096, ffn=11008, kv=4096, vocab=32000)
NUM_BYTES = 2 * sum(torch.Size(shape).numel() for shape in SHAPES.values())

# Loads the drafter, reads every one of its weights, and tells what it found and the peak of the process's memory.
LOAD = """
import json, sys
from pathlib import Path
from transformers_gumiho import GumihoModel

model = GumihoModel.from_pretrained(sys.argv[1], cache_dir=sys.argv[2])
largest = {name: tensor.max().item() for name, tensor in model.state_dict().items()}
samples = {name: tensor.flatten()[:8].tolist() for name, tensor in model.state_dict().items()}
# What getrusage tells begins with the memory of the process that started this one.
status = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
print(json.dumps({"largest": largest, "samples": samples, "peak": peak, "dtype": str(model.dtype)}))
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """A Hub cache with random weights of full size, and those weights; the files are gone after the test."""
    free = shutil.disk_usage(tmp_path).free
    if free < 1.2 * NUM_BYTES:
        pytest.skip(f"needs {1.2 * NUM_BYTES / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free")
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.empty(shape, dtype=torch.float16) for name, shape in SHAPES.items()}
    for tensor in weights.values():
        tensor.uniform_(-1, 1, generator=generator)
    try:
        torch.save(weights, tmp_path / "pytorch_model.bin")
        write_to_hub_cache(tmp_path / "cache", REPO, [tmp_path / "pytorch_model.bin"])
        yield tmp_path / "cache", weights
    finally:
        shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of its memory from /proc")
def test_full_size_checkpoint_loads_by_name_in_little_more_memory_than_its_weights(
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    cache_dir, weights = checkpoint
    command = [sys.executable, "-c", LOAD, REPO, str(cache_dir)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert f"'{REPO}' has no config.json" in done.stderr
    loaded = json.loads(done.stdout)
    assert loaded["dtype"] == "torch.float16"
    assert loaded["samples"] == {name: tensor.flatten()[:8].tolist() for name, tensor in weights.items()}
    assert loaded["largest"] == {name: tensor.max().item() for name, tensor in weights.items()}
    print(f"peak memory: {loaded['peak'] / NUM_BYTES:.3f} times the weights ({NUM_BYTES / 1e9:.2f} GB)")  # noqa: T201
    # The rest is the interpreter and its libraries.
    assert NUM_BYTES < loaded["peak"] < 1.3 * NUM_BYTES
