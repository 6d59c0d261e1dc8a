"""paddle.fluid.io: saving and loading of parameters."""

from fleetx.paddle.static.saving import (
    load_params,
    load_persistables,
    save_inference_model,
    save_params,
    save_persistables,
)

__all__ = ["load_params", "load_persistables", "save_inference_model", "save_params", "save_persistables"]
