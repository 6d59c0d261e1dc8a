from __future__ import annotations

import pytest
from file_server import Server

from fleetx.paddle.download.downloader import Downloader
from fleetx.paddle.download.fetch import Patience

VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "PADDLE_RANK_IN_NODE",
    "PADDLE_TRAINER_ID",
    "SLURM_STEP_ID",
)


@pytest.fixture(autouse=True)
def _nobody_launched(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server():
    served = Server()
    yield served
    served.stop()


@pytest.fixture
def bring(tmp_path):
    """bring(address, ...): download from it into tmp_path/data with a quick temper; the folder."""

    def call(address, **words):
        config = tmp_path / "set.yaml"
        config.write_text(f"bos_path: {address}\n")
        quick = Downloader(patience=Patience(attempts=3, pause=0.01, timeout=5))
        quick.download_from_bos(str(config), str(tmp_path / "data"), **words)
        return tmp_path / "data"

    return call
