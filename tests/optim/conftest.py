from __future__ import annotations

import pytest

from fleetx.optim import native


@pytest.fixture(params=["compiled", "foreach"])
def kernels(request, monkeypatch):
    """Both implementations of an update, each wherever it can be used."""
    if request.param == "compiled" and not native.available():
        pytest.skip(native.reason())
    monkeypatch.setenv("FLEETX_KERNELS", request.param)
    return request.param
