"""Run scripts written for Paddle's static Fleet: `fleetx.static.install()`. The code is in `fleetx.paddle.static`."""

from fleetx.paddle.static import install

__all__ = ["install"]
