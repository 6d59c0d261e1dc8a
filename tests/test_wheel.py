"""The wheel and the source package: installed elsewhere, without a compiler, they train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SITE = Path(pytest.__file__).parent.parent
LIBRARIES = ["fleetx/optim/_kernels.so", "fleetx/parts/dgc/_codec.so", "fleetx/parts/_blocks/_blocks.so"]
LAUNCH = ["-m", "fleetx.launch", "--device", "cpu", "--nproc_per_node", "2", "train.py"]
FILTER = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
TRAIN = """
import torch
from fleetx import fleet
from fleetx.optim import native
from fleetx.parts.dgc import native as codec

fleet.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
strategy = fleet.DistributedStrategy(lars=True, gradient_merge={"k_steps": 2})
model, optimizer = fleet.distribute(model, optimizer, strategy)
for _ in range(4):
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(fleet.worker_num(), native.available(), codec.available(), native.reason())
"""


def copied(folder):
    """What git knows, as a fresh clone has it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name.startswith(("src/", "pyproject", "setup.py", "README", "LICENSE")) and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def built(kind, source, **env):
    code = f"from setuptools.build_meta import *; print('built', {kind}('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=os.environ | env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return source / "dist" / done.stdout.split("built ")[-1].strip()


def trained(wheel, folder):
    """Two workers, in a venv that has what fleetx needs but not fleetx, and with no compiler on the path."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=100)
    site = next((folder / "venv").glob("lib/python3*/site-packages"))
    (site / "dependencies.pth").write_text(f"{SITE}\n")  # leaves out the .pth files there, and so this checkout
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel],
        check=True,
        timeout=100,
    )
    (folder / "train.py").write_text(TRAIN)
    launch = [folder / "venv/bin/python", *LAUNCH]
    env = {"PATH": str(folder / "venv/bin"), "HOME": str(folder)}
    done = subprocess.run(launch, cwd=folder, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_wheel_trains_with_its_compiled_kernels_under_any_python(tmp_path):
    wheel = built("build_wheel", copied(tmp_path / "source"))
    assert "-py3-none-" in wheel.name
    assert set(LIBRARIES) <= set(zipfile.ZipFile(wheel).namelist())
    assert trained(wheel, tmp_path) == "2 True True"


@pytest.mark.nightly
def test_the_source_package_builds_without_a_compiler_and_trains_too(tmp_path):
    shutil.unpack_archive(built("build_sdist", copied(tmp_path / "source")), tmp_path, **FILTER)
    wheel = built("build_wheel", next(tmp_path.glob("fleetx-*")), CC="/bin/false")
    assert not set(LIBRARIES) & set(zipfile.ZipFile(wheel).namelist())
    said = trained(wheel, tmp_path)
    assert said.startswith("2 False False the compiled kernels are not installed")
