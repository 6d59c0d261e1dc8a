"""Scripts in the shapes of FleetX's tutorials, as a user starts them: under fleetrun with two workers.

A launch costs seconds, so one runs them all, one after the other.
"""

from __future__ import annotations

import hashlib
import re
import tarfile

import pytest
from data_files import digital, images, varied
from static_runs import costs, fleetrun
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
test_program = fluid.default_main_program().clone(for_test=True)
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
    if fleet.worker_index() == 0 and i % 2 == 0:
        found = [exe.run(test_program, feed=d, fetch_list=[model.loss])[0] for d in model.get_val_dataloader('.')()]
        print("test: %d batches, loss %f" % (len(found), sum(found)))
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

RESNET50 = """
downloader = X.utils.Downloader()
local_path = downloader.download_from_bos(
    fs_yaml='images.yaml', local_path='sharded', shard_num=fleet.worker_num(), shard_id=fleet.worker_index())
model = X.applications.Resnet50(hidden=4, image_size=32, num_classes=20, layers=(1, 1))
loader = model.get_train_dataloader(local_path, batch_size=4)
val_loader = model.get_val_dataloader(local_path, batch_size=4)
"""
VGG16 = """
local_path = X.utils.Downloader().download_from_hdfs(configs.download_config, local_path='from_hdfs')
model = X.applications.VGG16(hidden=4, image_size=32, num_classes=20, layers=(1, 1), ffn=16)
loader = model.load_imagenet_from_file(local_path + '/train.txt', batch_size=4, use_dali=True)
val_loader = model.load_imagenet_from_file(local_path + '/val.txt', batch_size=4, phase='val')
"""
BERT = """
local_path = X.utils.Downloader().download_from_bos(fs_yaml='lines.yaml', local_path='lines')
model = X.applications.BertBase(layers=2, hidden=8, heads=1, vocab_size=200, max_seq_len=32)
loader = model.get_train_dataloader(data_dir='{}'.format(local_path), batch_size=128)
val_loader = model.get_val_dataloader(local_path, batch_size=128)
"""
TRANSFORMER = """
model = X.applications.Transformer(layers=1, hidden=8, heads=2, vocab_size=40, max_seq_len=16)
loader = model.get_train_dataloader('wmt', batch_size=64)
val_loader = model.get_val_dataloader('wmt', batch_size=64)
"""
BERT_STRATEGY = """
strategy.amp = True
strategy.lamb = True
strategy.recompute = True
strategy.recompute_configs = {"checkpoints": model.checkpoints}
"""
MOMENTUM, ADAM = "Momentum(learning_rate=configs.lr, momentum=0.9)", "Adam(learning_rate=configs.lr)"
CASES = {
    "resnet50": (RESNET50, "strategy.lars = True", MOMENTUM, "['acc1', 'acc5']"),
    "vgg16": (VGG16, "strategy.dgc = True", MOMENTUM, "['acc1', 'acc5']"),
    "bert": (BERT, BERT_STRATEGY, ADAM, "['next_sent_acc']"),
    "transformer": (TRANSFORMER, "strategy.sharding = True", ADAM, "['sum_cost']"),
}

# Those of FleetX's documents that no script above uses.
STRATEGIES = {
    "gradient_merge": "strategy.gradient_merge = True; strategy.gradient_merge_configs = {'k_steps': 2, 'avg': True}",
    "localsgd": "strategy.localsgd = True; strategy.localsgd_configs = {'k_steps': 2}",
    "adaptive_localsgd": "strategy.adaptive_localsgd = True",
    "fp16_allreduce": "strategy.fp16_allreduce = True",
    "sync_batch_norm": "strategy.sync_batch_norm = True",
    "hierarchical": "strategy.use_hierarchical_allreduce = True; strategy.hierarchical_allreduce_inter_nranks = 8",
    "fusion": "strategy.fuse_all_reduce_ops = True; strategy.fuse_grad_size_in_MB = 16",
    "graph": "strategy.build_strategy = fluid.BuildStrategy(); strategy.execution_strategy = fluid.ExecutionStrategy()",
}
EACH_STRATEGY = """
import fleetx as X
import paddle
import paddle.fluid as fluid
import paddle.distributed.fleet as fleet

paddle.enable_static()
fleet.init(is_collective=True)


def train(name, change):
    model = X.applications.Resnet50(hidden=4, image_size=32, num_classes=20, layers=(1,))
    loader = model.get_train_dataloader('sharded', batch_size=4)
    strategy = fleet.DistributedStrategy()
    exec(change)
    optimizer = fleet.distributed_optimizer(fluid.optimizer.Momentum(learning_rate=0.01, momentum=0.9), strategy)
    optimizer.minimize(model.loss)
    exe = fluid.Executor(fluid.CUDAPlace(0))
    exe.run(fluid.default_startup_program())
    for data in loader():
        cost = exe.run(fluid.default_main_program(), feed=data, fetch_list=[model.loss])
    print("strategy", name, "cost = %f" % cost[0])


for name, change in STRATEGIES.items():
    train(name, change)
"""

ALL = """
import runpy
import sys
for name in sys.argv.pop(1).split(","):
    print("script", name, flush=True)
    runpy.run_path(name + ".py", run_name="__main__")
"""


def publish(where, folder, meta):
    """A remote folder: its parts as tars in filelist.txt, the lists in meta.txt. Returns its address."""
    remote = where / f"remote_{folder.name}"
    remote.mkdir()
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in meta)
    sums = ""
    for part in range(2):
        name = f"part-{part}.tar"
        with tarfile.open(remote / name, "w") as tar:
            for file in files[part::2]:
                tar.add(file, file.relative_to(folder))
        sums += f"{name} {hashlib.md5((remote / name).read_bytes()).hexdigest()}\n"
    (remote / "filelist.txt").write_text(sums)
    (remote / "meta.txt").write_text("\n".join(meta))
    for name in meta:
        (remote / name).write_bytes((folder / name).read_bytes())
    return remote


@pytest.fixture
def site(tmp_path):
    """Data sets in the layouts of FleetX's site, and the yaml files that name them."""
    for name in ("images", "lines", "wmt"):
        (tmp_path / name).mkdir()
    images(tmp_path / "images", 16)
    images(tmp_path / "images", 8, phase="val")
    digital(tmp_path / "lines", varied(40))
    for phase in ("train", "val"):
        (tmp_path / f"lines/{phase}.txt").write_text("digital/part0\ndigital/part1\n")
    wmt(tmp_path / "wmt")
    wmt(tmp_path)
    pictures = publish(tmp_path, tmp_path / "images", ["train.txt", "val.txt"])
    lines = publish(tmp_path, tmp_path / "lines", ["train.txt", "val.txt", "vocab.txt"])
    (tmp_path / "images.yaml").write_text(f"bos_path: file://{pictures}\n")
    (tmp_path / "hdfs.yaml").write_text(f"fs.default.name: file://\ndata_path: {pictures}\n")
    (tmp_path / "lines.yaml").write_text(f"bos_path: file://{lines}\n")
    return tmp_path


@pytest.mark.slow
def test_every_shape_of_the_tutorials_trains_under_fleetrun(site):
    scripts = {"fleet_1": FLEET_1}
    for name, (model, strategy, optimizer, targets) in CASES.items():
        script = TRAINER.replace("MODEL", model).replace("STRATEGY", strategy)
        scripts[name] = script.replace("OPTIMIZER", optimizer).replace("VAL", targets)
    scripts["each_strategy"] = EACH_STRATEGY.replace("STRATEGIES", repr(STRATEGIES))
    for name, text in scripts.items():
        (site / f"{name}.py").write_text(text)
    said = fleetrun(site, ALL, ",".join(scripts), "--download_config", "hdfs.yaml")

    printed = dict(zip(*[iter(re.split(r"^script (\w+)$", said, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert len(costs(printed["fleet_1"])) > 3
    assert "test: 1 batches, loss " in printed["fleet_1"]  # by worker 0 alone
    for name, (*_, targets) in CASES.items():
        assert "epoch id: 1, step0, train_loss: " in printed[name]
        assert "speed > 0: True" in printed[name]
        assert f"epoch id: 0, {targets.split(chr(39))[1]}: " in printed[name]
    assert re.findall(r"strategy (\w+) cost = \d", printed["each_strategy"]) == list(STRATEGIES)
    assert said.count("use_dali=True has no effect") == 1
    assert "hierarchical_allreduce_inter_nranks = 8 has no effect: a node has 2 workers" in said
    assert {p.name for p in (site / "sharded/train").iterdir()} == {f"{i}.JPEG" for i in range(16)}
