"""fleetx in the training loops of other libraries, and their settings as a strategy.

`fabric` needs lightning; `transformers` and `training_arguments` need transformers. Reading settings files needs
neither.
"""

from typing import Any

# Settings of `amp` that match torch.amp.GradScaler, which a plain Trainer and accelerate use for fp16.
GRAD_SCALER: dict[str, Any] = {
    "dtype": "float16", "init_loss_scaling": 65536.0, "incr_every_n_steps": 2000, "decr_every_n_nan_or_inf": 1,
    "incr_ratio": 2.0, "decr_ratio": 0.5,
}  # fmt: skip
