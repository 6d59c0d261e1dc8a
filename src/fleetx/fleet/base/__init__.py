"""Where Paddle scripts look for role makers: `fleet.base.role_maker`."""

from fleetx.fleet.base import role_maker

__all__ = ["role_maker"]
