"""Scripts in the shapes of FleetX's tutorials, as a user starts them: under fleetrun with two workers."""

from __future__ import annotations

import pytest
from data_files import digital, images, varied
from static_runs import costs, fleetrun, in_ranks
from test_translation import wmt

FLEET_1 = """
import os
import fleet_lightning as lighting
import paddle.fluid as fluid
from paddle.fluid.incubate.fleet.collective import fleet, DistributedStrategy
import paddle.fluid.incubate.fleet.base.role_maker as role_maker

configs = lighting.parse_train_configs()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
model = lighting.applications.Transformer(layers=1, hidden=8, heads=2, vocab_size=40, max_seq_len=16)
loader = model.load_wmt16_dataset_from_file('vocab_all.bpe.32000', 'vocab_all.bpe.32000', 'part*', batch_size=32)
exec_strategy = fluid.ExecutionStrategy()
exec_strategy.num_threads = 2
dist_strategy = DistributedStrategy()
dist_strategy.exec_strategy = exec_strategy
dist_strategy.fuse_elewise_add_act_ops = True
optimizer = fluid.optimizer.Adam(learning_rate=configs.lr, beta1=configs.beta1, beta2=configs.beta2)
optimizer = fleet.distributed_optimizer(optimizer, strategy=dist_strategy)
optimizer.minimize(model.loss)
exe = fluid.Executor(fluid.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0))))
exe.run(fluid.default_startup_program())
for i, data in enumerate(loader()):
    cost_val = exe.run(fleet.main_program, feed=data, fetch_list=[model.loss.name])
    print("worker_index: %d, step%d cost = %f" % (fleet.worker_index(), i, cost_val[0]))
"""

TRAINER = """
import fleetx as X
import paddle
import paddle.fluid as fluid
import paddle.distributed.fleet as fleet

paddle.enable_static()
configs = X.parse_train_configs()
fleet.init(is_collective=True)
MODEL
strategy = fleet.DistributedStrategy()
strategy.elastic = False
STRATEGY
optimizer = fluid.optimizer.OPTIMIZER
optimizer = fleet.distributed_optimizer(optimizer, strategy)
optimizer.minimize(model.loss)
trainer = X.MultiGPUTrainer()
trainer.fit(model, loader, 2, start_step=0)
print("speed > 0:", trainer.benchmark(model, loader, 1, start_step=0) > 0)
trainer.val(model, val_loader, VAL, 0)
"""

IMAGES = """
model = X.applications.NAME(hidden=4, image_size=32, num_classes=20, layers=(1, 1))
loader = model.get_train_dataloader('.', batch_size=4, use_dali=True)
val_loader = model.get_val_dataloader('.', batch_size=4)
"""
BERT = """
model = X.applications.BertBase(layers=1, hidden=8, heads=1, vocab_size=200, max_seq_len=32)
loader = model.get_train_dataloader('.', batch_size=128)
val_loader = model.get_val_dataloader('.', batch_size=128)
"""
TRANSFORMER = """
model = X.applications.Transformer(layers=1, hidden=8, heads=2, vocab_size=40, max_seq_len=16)
loader = model.get_train_dataloader('.', batch_size=64)
val_loader = model.get_val_dataloader('.', batch_size=64)
"""
MOMENTUM, ADAM = "Momentum(learning_rate=configs.lr, momentum=0.9)", "Adam(learning_rate=configs.lr)"
CASES = {
    "resnet50": (IMAGES.replace("NAME", "Resnet50"), "strategy.lars = True", MOMENTUM, "['acc1', 'acc5']"),
    "vgg16": (IMAGES.replace("NAME", "VGG16"), "strategy.dgc = True", MOMENTUM, "['acc1', 'acc5']"),
    "bert": (BERT, "strategy.amp = True\nstrategy.lamb = True", ADAM, "['next_sent_acc']"),
    "transformer": (TRANSFORMER, "strategy.sharding = True", ADAM, "['sum_cost']"),
}


def data(folder):
    images(folder, 12)
    images(folder, 4, phase="val")


@pytest.mark.slow
def test_a_script_of_fleet_1_trains_a_transformer_under_fleetrun(tmp_path):
    wmt(tmp_path)
    printed = costs(fleetrun(tmp_path, FLEET_1))
    assert len(printed) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fit_benchmark_and_val_of_every_application(ranks, tmp_path, name):
    if name == "transformer":
        wmt(tmp_path)
    elif name == "bert":
        digital(tmp_path, varied(40))
        for phase in ("train", "val"):
            (tmp_path / f"{phase}.txt").write_text("digital/part0\ndigital/part1\n")
    else:
        data(tmp_path)
    model, strategy, optimizer, targets = CASES[name]
    script = TRAINER.replace("MODEL", model).replace("STRATEGY", strategy)
    printed = in_ranks(ranks, tmp_path, script.replace("OPTIMIZER", optimizer).replace("VAL", targets))
    assert "epoch id: 1, step0, train_loss: " in printed
    assert "speed > 0: True" in printed
    assert f"epoch id: 0, {targets[2:-2].split(chr(39))[0]}: " in printed
