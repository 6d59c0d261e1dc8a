"""A script for Paddle's static Fleet, run by fleetx: programs, an executor, feeds by name.

    fleetrun --device cpu --nproc_per_node 2 --paddle-api fleetx examples/static_style.py

Where paddle is not installed, fleetrun needs no --paddle-api: it says in one line that these imports are fleetx's.
"""

import numpy as np
import paddle.distributed.fleet as fleet
import paddle.fluid as fluid
import prepared

import fleetx as X
import paddle

EPOCHS = 8

paddle.enable_static()
configs = X.parse_train_configs()
fleet.init(is_collective=True)

model = X.applications.Resnet50(layers=(1, 1, 1), hidden=16, image_size=32, num_classes=10)
pictures = prepared.digits("example_data/digits")
loader = model.get_train_dataloader(pictures, batch_size=16, drop_last=True)

strategy = fleet.DistributedStrategy()
strategy.recompute = True
strategy.recompute_configs = {"checkpoints": model.checkpoints}
strategy.gradient_merge = True
strategy.gradient_merge_configs = {"k_steps": 2}

optimizer = fluid.optimizer.Momentum(learning_rate=0.05, momentum=configs.momentum)
optimizer = fleet.distributed_optimizer(optimizer, strategy)
optimizer.minimize(model.loss)

exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
for epoch in range(EPOCHS):
    rows = [
        exe.run(fluid.default_main_program(), feed=data, fetch_list=[model.loss.name, model.target["acc1"].name])
        for data in loader()
    ]
    if fleet.worker_index() == 0:
        loss, right = np.array(rows).mean(0).flatten()
        print(f"epoch {epoch}: loss {loss:.3f}, right while training {right:.0%}", flush=True)
