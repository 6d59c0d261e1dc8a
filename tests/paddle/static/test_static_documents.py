"""The scripts of Paddle's documentation, as published except for paths, sizes and missing lines.

One runs under fleetrun, which proves how a script starts; the others run in the pool of ranks.
"""

from __future__ import annotations

import hashlib
import re
import tarfile

import numpy as np
import pytest
from data_files import digital, images, line
from static_runs import costs, falls, fleetrun, in_ranks

SMALL_RESNET = "layers=(1, 1), hidden=4, image_size=16, num_classes=10"


@pytest.fixture
def pictures(tmp_path):
    """A folder like one from the Downloader: eight pictures of two classes, each listed 20 times."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    images(folder, 8, side=20)
    rows = [f"{i % 8}.JPEG {i % 8 // 4}\n" for i in range(160)]
    (folder / "train.txt").write_text("".join(rows))
    return folder


LARGE_BATCH = """
import numpy as np
import fleet_lightning as lighting
import paddle.fluid as fluid
import paddle.fleet.base.role_maker as role_maker
import time
import paddle.fleet as fleet
import paddle
import os

configs = lighting.parse_train_configs()
role = role_maker.PaddleCloudRoleMaker(is_collective=True)
fleet.init(role)
model = lighting.applications.Bert_large(layers=17, hidden=16, heads=2, vocab_size=200, max_seq_len=32)

data_loader = model.load_digital_dataset_from_file(
    data_dir='DATA',
    vocab_path='VOCAB',
    max_seq_len=32,
    batch_size=4,
)
place = fluid.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))
exec_strategy = fluid.ExecutionStrategy()
exec_strategy.num_threads = 2
exec_strategy.num_iteration_per_drop_scope = 1
dist_strategy = fleet.DistributedStrategy()
dist_strategy.execution_strategy = exec_strategy
dist_strategy.recompute = False
dist_strategy.nccl_comm_num = 3
dist_strategy.use_hierarchical_allreduce = True

optimizer = fluid.optimizer.Adam(learning_rate=configs.lr)
optimizer = fleet.distributed_optimizer(optimizer, dist_strategy)
optimizer.minimize(model.loss)
exe = fluid.Executor(place)
exe.run(fluid.default_startup_program())

total_time = 0
scope = fluid.global_scope()
for i, data in enumerate(data_loader()):
    if i >= 2:
        start_time = time.time()
    cost_val = exe.run(paddle.default_main_program(),
                       feed=data,
                       fetch_list=[model.loss.name])
    if i >= 2:
        end_time = time.time()
        total_time += (end_time - start_time)
        print(
            "worker_index: %d, step%d cost = %f, total time cost = %f, step per second: %f, speed: %f"
            % (fleet.worker_index(), i, cost_val[0], total_time,
               (i - 1) / total_time, 1 / (end_time - start_time)))
    print("step: %d, encoder_layer_16_ffn_fc_1.w_0: %s" % (
         i, scope.var("encoder_layer_16_ffn_fc_1.w_0").get_tensor().__array__()))
"""


def test_the_large_batch_script_trains_bert_and_prints_a_weight(tmp_path):
    data, vocabulary = digital(tmp_path, [line(i) for i in range(4)] * 14, packed=(0,))
    script = LARGE_BATCH.replace("DATA", str(data)).replace("VOCAB", str(vocabulary))
    said = fleetrun(tmp_path, script, "--lr", "0.003", options=("--device", "cpu", "--gpus", "0,1", "--log_dir", "log"))
    assert falls(costs(said))
    weights = re.findall(r"step: \d+, encoder_layer_16_ffn_fc_1\.w_0: \[\[ *([-\d.e]+)", said)
    assert len(set(weights)) == len(weights) == 14  # each step has changed it
    logs = sorted(path.name for path in (tmp_path / "log").iterdir())
    assert logs == ["workerlog.0", "workerlog.1"]
    second = (tmp_path / "log" / "workerlog.1").read_text()
    assert re.findall(r"w_0: (\[\[[^a-z]*\]\])", second) == re.findall(r"w_0: (\[\[[^a-z]*\]\])", said)  # on both ranks
    assert costs(second) != costs(said)  # each rank has its own share of the data
    for once in (
        "`import fleet_lightning` gives fleetx",
        "CUDAPlace means the CPU",
        "execution_strategy has no effect",
    ):
        assert said.count(once) == 1
        assert once not in second


MULTI_STRATEGY = """
import os
import fleetx as X
import paddle
import paddle.fluid as fluid
import paddle.distributed.fleet.base.role_maker as role_maker
import time
import paddle.distributed.fleet as fleet

paddle.enable_static()
configs = X.parse_train_configs()
fleet.init(is_collective=True)
model = X.applications.Resnet50(SIZES)
downloader = X.utils.Downloader()
local_path = downloader.download_from_bos(
    fs_yaml='FS_YAML',
    local_path='./data')
batch_size = 4
loader = model.get_train_dataloader(local_path, batch_size=batch_size)
dist_strategy = fleet.DistributedStrategy()
STRATEGY

optimizer = fluid.optimizer.Momentum(learning_rate=0.01, momentum=0.9)
optimizer = fleet.distributed_optimizer(optimizer, dist_strategy)
optimizer.minimize(model.loss)
place = fluid.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))
exe = fluid.Executor(place)
exe.run(fluid.default_startup_program())

for i, data in enumerate(loader()):
    start_time = time.time()
    cost_val = exe.run(model.main_prog,
                        feed=data,
                        fetch_list=[model.loss.name])

    end_time = time.time()
    print(
        "worker_index: %d, step%d cost = %f, speed: %f"
        % (fleet.worker_index(), i, cost_val[0], batch_size / (end_time - start_time)))
"""

THREE = """
dist_strategy.amp = True
dist_strategy.recompute = True
dist_strategy.recompute_configs = {"checkpoints": model.checkpoints}
dist_strategy.lars = True
dist_strategy.lars_configs = {
                    "lars_coeff": 0.001,
                    "lars_weight_decay": 0.0005,
                    "exclude_from_weight_decay": ['batch_norm', '.b_0']
                }
"""
AUTO = "dist_strategy.auto = True"


@pytest.fixture
def served(tmp_path, pictures):
    """The pictures on a server: the lists, and a tar with its md5."""
    remote = tmp_path / "remote"
    remote.mkdir()
    with tarfile.open(remote / "a.tar", "w") as tar:
        tar.add(pictures / "train", "train")
    (remote / "train.txt").write_bytes((pictures / "train.txt").read_bytes())
    (remote / "meta.txt").write_text("train.txt\n")
    (remote / "filelist.txt").write_text(f"a.tar {hashlib.md5((remote / 'a.tar').read_bytes()).hexdigest()}\n")
    (tmp_path / "small_imagenet.yaml").write_text(f"bos_path: {remote.as_uri()}\n")
    return "small_imagenet.yaml"


@pytest.mark.parametrize("strategy", [THREE, AUTO], ids=["amp + recompute + lars", "auto"])
def test_the_scripts_of_several_strategies_and_of_auto_train_resnet(ranks, tmp_path, served, strategy):
    script = MULTI_STRATEGY.replace("SIZES", SMALL_RESNET).replace("FS_YAML", served).replace("STRATEGY", strategy)
    said = in_ranks(ranks, tmp_path, script)
    assert len(re.findall(r"^worker_index: 0, step\d+ cost = [\d.]+, speed: [\d.]+$", said, re.MULTILINE)) == 20
    assert falls(costs(said))


LARS = """
import os
import fleetx as X
import paddle.fluid as fluid
import paddle.distributed.fleet.base.role_maker as role_maker
import time
import paddle.distributed.fleet as fleet
import paddle

model = X.applications.Resnet50(SIZES)
loader = model.load_imagenet_from_file("TRAIN", batch_size=4)

configs = X.parse_train_configs()
role = role_maker.PaddleCloudRoleMaker(is_collective=True)
fleet.init(role)
dist_strategy = fleet.DistributedStrategy()

dist_strategy.lars = True
dist_strategy.lars_configs = {
                    "lars_coeff": 0.001,
                    "lars_weight_decay": 0.0005,
                    "exclude_from_weight_decay": ['batch_norm', '.b_0']
                }

optimizer = paddle.optimizer.Momentum(learning_rate=0.01, momentum=0.9)
optimizer = fleet.distributed_optimizer(optimizer, dist_strategy)
optimizer.minimize(model.loss)
place = fluid.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))
exe = fluid.Executor(place)
exe.run(fluid.default_startup_program())

data_loader = loader
total_time = 0
for i, data in enumerate(data_loader()):
    start_time = time.time()
    cost_val = exe.run(paddle.static.default_main_program(),
                       feed=data,
                       fetch_list=[model.loss.name])
    end_time = time.time()
    total_time += (end_time - start_time)
    print(
        "worker_index: %d, step%d cost = %f, total time cost = %f, step per second: %f, speed: %f"
        % (fleet.worker_index(), i, cost_val[0], total_time,
           (i - 9) / total_time, 1 / (end_time - start_time)))
"""

# The snippets of the reference of DistributedStrategy, each in the same training loop.
REFERENCE = """
import numpy as np
import fleetx as X
import paddle
import paddle.distributed.fleet as fleet

fleet.init(is_collective=True)


def train(strategy):
    model = X.applications.VGG16(layers=(1, 1), hidden=4, ffn=16, image_size=16, num_classes=4, dropout=0.0)
    if strategy.recompute:
        x, y = model.checkpoints
        strategy.recompute_configs = {"checkpoints": [x, y]}
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Momentum(learning_rate=0.5), strategy)
    optimizer.minimize(model.loss)
    exe = paddle.static.Executor(paddle.CUDAPlace(0))
    exe.run(paddle.default_startup_program())
    feed = {"image": np.random.default_rng(0).normal(size=(24, 3, 16, 16)), "label": np.arange(24)[:, None] % 4}
    for i in range(12):
        cost, = exe.run(paddle.default_main_program(), feed, [model.loss])
        print("step%d cost = %f" % (i, cost))


strategy = fleet.DistributedStrategy()
strategy.recompute = True
strategy.recompute_configs = {"checkpoints": ["x", "y"]}
train(strategy)

strategy = fleet.DistributedStrategy()
strategy.gradient_merge = True
strategy.gradient_merge_configs = {"k_steps": 4, "avg": True}
train(strategy)

strategy = fleet.DistributedStrategy()
strategy.pipeline = True
strategy.pipeline_configs = {"micro_batch": 12}
train(strategy)
"""


def test_the_lars_script_trains_resnet(ranks, tmp_path, pictures):
    script = LARS.replace("SIZES", SMALL_RESNET).replace("TRAIN", str(pictures / "train.txt"))
    assert falls(costs(in_ranks(ranks, tmp_path, script)))


def test_the_blocks_of_the_reference_train(ranks, tmp_path):
    recompute, merge, pipeline = np.reshape(costs(in_ranks(ranks, tmp_path, REFERENCE)), (3, 12)).tolist()
    assert falls(recompute)
    assert merge[0] == merge[3] > merge[4] == merge[7] > merge[8]  # one update in four steps
    assert falls(pipeline)
