"""A Ray Train job, run by test_schedulers.py in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"


def train(config):
    os.chdir(config["folder"])
    exec(compile(config["script"], "train.py", "exec"), {})


if __name__ == "__main__":
    folder, script = sys.argv[1], Path(sys.argv[2]).read_text()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", _temp_dir=f"{folder}/ray")
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder, "script": script},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/results"),
    )
    trainer.fit()
    ray.shutdown()
