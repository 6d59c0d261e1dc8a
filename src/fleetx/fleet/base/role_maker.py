"""Paddle's place for the role makers."""

from fleetx.roles import PaddleCloudRoleMaker, UserDefinedRoleMaker

__all__ = ["PaddleCloudRoleMaker", "UserDefinedRoleMaker"]
