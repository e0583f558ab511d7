import logging
import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
