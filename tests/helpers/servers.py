"""Servers in processes of their own."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@contextmanager
def serving(*words: object, **environment: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yields the address of a server, once it answers, and its process, which `python -m` starts with these words."""
    port = free_port()
    command = [sys.executable, "-m", *map(str, words), "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
    url, deadline = f"http://localhost:{port}", time.monotonic() + 600
    try:
        while not _is_healthy(url):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.3)
        yield url, process
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True
