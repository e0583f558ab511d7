import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure() -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # The models here are tiny: threads only wait for each other, for very long where the machine is busy.
    torch.set_num_threads(1)
