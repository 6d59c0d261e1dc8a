from __future__ import annotations

import pytest

from fleetx.optim import dispatch, foreach, native, stock


@pytest.fixture(params=["native", "stock", "foreach"])
def path(request, monkeypatch):
    """Each of the three ways to compute an update, where it is chosen for everything that it can take."""
    if request.param == "native" and not native.available():
        pytest.skip(native.reason())
    monkeypatch.setattr(
        dispatch, "_fast", lambda: {"native": native, "stock": stock, "foreach": foreach}[request.param]
    )
    return request.param
