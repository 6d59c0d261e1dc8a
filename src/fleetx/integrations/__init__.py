"""fleetx in the loops of other libraries. Each module needs the library that it is named after."""

from typing import Any

# `amp` as torch.amp.GradScaler scales the loss: a plain Trainer and accelerate use it for fp16.
GRAD_SCALER: dict[str, Any] = {
    "dtype": "float16", "init_loss_scaling": 65536.0, "incr_every_n_steps": 2000, "decr_every_n_nan_or_inf": 1,
    "incr_ratio": 2.0, "decr_ratio": 0.5,
}  # fmt: skip
