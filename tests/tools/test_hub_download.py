"""Downloading a drafter from a Hub, which is a small server here: what is asked for, and what an absent file means."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import transformers
from checkpoints import REPO, VLLM_FIELDS, make_weights, write_weights
from hub_cache import COMMIT
from packaging.version import Version


TOKEN = "hf_token"

# The packaged config is replaced by a tiny one.
LOAD = """
import sys
from pathlib import Path
from transformers_gumiho import GumihoModel
from transformers_gumiho.model import loading

loading._FOLDERS = (Path(sys.argv[1]),)
for token in sys.argv[4:]:
    try:
        model = GumihoModel.from_pretrained(sys.argv[2], cache_dir=sys.argv[3], revision="v2", token=token)
    except OSError as error:
        print("refused:", error, file=sys.stderr)
print(model.config.model.hidden_size, model.fc.weight.float().abs().sum().item())
"""


class Repository(BaseHTTPRequestHandler):
    """Serves the files of a folder as the Hub does, to those who have the token. At `main` there is no file."""

    folder: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        place, _, name = self.path.rpartition("/")
        places = [f"/{REPO}/resolve/{revision}" for revision in ("v2", COMMIT)]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"X-Error-Code": "RepoNotFound"})
        elif self.path == f"/api/models/{REPO}/revision/v2":
            self.answer(200, {}, json.dumps({"id": REPO, "sha": COMMIT, "siblings": []}).encode())
        elif place not in places or not (self.folder / name).is_file():
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            content = (self.folder / name).read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            self.answer(200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, content)

    def answer(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Writes nothing: the output of tests is for what fails."""


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """The address of a Hub with one repository, which has a weight file and nothing else."""
    folder = tmp_path / "repository"
    folder.mkdir()
    write_weights(folder, make_weights())
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Repository,), {"folder": folder}))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="older releases ask for a config without the token"
)
def test_download_with_a_token_and_a_revision(endpoint: str, tmp_path: Path) -> None:
    """First with another token: not to be allowed is another thing than to have no config."""
    packaged = tmp_path / "packaged" / REPO.partition("/")[2]
    packaged.mkdir(parents=True)
    (packaged / "config.json").write_text(json.dumps(VLLM_FIELDS))
    (packaged / "generation_config.json").write_text("{}")
    cache_dir = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-c", LOAD, packaged.parent, REPO, cache_dir, "hf_another", TOKEN],
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    before, _, after = done.stderr.partition("refused: ")
    assert "packaged" not in before
    assert "is not a valid model identifier" in after
    assert f"'{REPO}' has no config.json; the packaged one of Gumiho-llama3-8b is used." in after
    hidden_size, total = done.stdout.split()
    assert hidden_size == "32"
    assert float(total) == pytest.approx(make_weights()["fc.weight"].float().abs().sum().item())
    # The layout that the other tests give their cache.
    storage = cache_dir / f"models--{REPO.replace('/', '--')}"
    assert (storage / "refs" / "v2").read_text() == COMMIT
    weights = storage / "snapshots" / COMMIT / "pytorch_model.bin"
    assert weights.is_symlink()
    assert weights.resolve().parent == storage / "blobs"
    assert (storage / ".no_exist" / COMMIT / "config.json").is_file()
