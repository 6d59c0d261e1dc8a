"""Paddle's place for the role makers."""

from fleetx.comm.roles import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker

__all__ = ["PaddleCloudRoleMaker", "Role", "UserDefinedRoleMaker"]
