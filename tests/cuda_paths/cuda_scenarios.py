"""What is trained on the device of cuda_device.py, and how often the host may wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BF16, FP16 = {"dtype": "bfloat16"}, {"init_loss_scaling": 1024.0}
MERGE, CLIP, BLOCKS = {"k_steps": 2}, {"clip_norm": 0.1}, {"checkpoints": ["0", "1"]}
OFFLOAD = {**BLOCKS, "enable_offload": True}


@dataclass(frozen=True)
class Scenario:
    name: str
    strategy: dict[str, Any] = field(default_factory=dict)
    adam: bool = False
    waits: int = 1  # times that the host may wait for the device per update, after the first steps
    why: str = "may the update be applied?"
    tolerance: float = 0.0  # against the same training on the CPU; 0: equal bit for bit
    streams: int = 1  # that are used


ALONE = [
    Scenario("nothing"),
    Scenario("amp bfloat16", {"amp": BF16}, tolerance=2e-2),
    Scenario("amp float16", {"amp": FP16}, tolerance=2e-2),
    Scenario("gradient_merge", {"gradient_merge": MERGE}),
    Scenario("clip", {"clip": CLIP}),
    Scenario("lars", {"lars": True}, tolerance=1e-5),
    Scenario("lamb", {"lamb": True}, adam=True, tolerance=1e-4),
    Scenario("muon", {"muon": True}, adam=True, tolerance=1e-4),
    Scenario("recompute", {"recompute": BLOCKS}),
    Scenario("recompute with offload", {"recompute": OFFLOAD}, streams=2),
    Scenario("sync_batch_norm", {"sync_batch_norm": True}),
    Scenario("ema", {"ema": {"decay": 0.9}}),
    Scenario("noise_scale, gradient_merge", {"noise_scale": {"every": 1}, "gradient_merge": MERGE}),
    Scenario("amp float16, gradient_merge, clip", {"amp": FP16, "gradient_merge": MERGE, "clip": CLIP}, tolerance=2e-2),
    Scenario("amp bfloat16, lars, clip", {"amp": BF16, "lars": True, "clip": CLIP}, tolerance=2e-2),
    Scenario(
        "amp float16, lamb, gradient_merge, recompute with offload, clip, sync_batch_norm",
        {"amp": FP16, "lamb": True, "gradient_merge": MERGE, "recompute": OFFLOAD, "clip": CLIP,
         "sync_batch_norm": True},
        adam=True, tolerance=5e-2, streams=2,
    ),
]  # fmt: skip

PIPELINE = {"stages": ["1.2"], "micro_batch": 2}
TWO_RANKS = [
    Scenario("data parallelism"),
    Scenario("amp float16, gradient_merge, clip", {"amp": FP16, "gradient_merge": MERGE, "clip": CLIP}, tolerance=2e-2),
    Scenario("lars", {"lars": True}, tolerance=1e-5),
    Scenario("lamb, clip", {"lamb": True, "clip": CLIP}, adam=True, tolerance=1e-4),
    Scenario("muon", {"muon": True}, adam=True, tolerance=1e-4),
    Scenario("recompute with offload", {"recompute": OFFLOAD}, streams=2),
    Scenario("sync_batch_norm", {"sync_batch_norm": True}, tolerance=1e-5),
    Scenario("fp16_allreduce", {"fp16_allreduce": True}, tolerance=1e-3),
    Scenario("fp16_allreduce, amp bfloat16, sync_batch_norm",
             {"fp16_allreduce": True, "amp": BF16, "sync_batch_norm": True}, tolerance=2e-2),
    Scenario("quantized_allreduce", {"quantized_allreduce": True}, tolerance=1e-2),
    Scenario("noise_scale", {"noise_scale": {"every": 1}}),
    Scenario("two communicators", {"nccl_comm_num": 2}),
    Scenario("hierarchical", {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}),
    Scenario("localsgd", {"localsgd": {"k_steps": 2}}),
    Scenario("localsgd in the background, with an outer optimizer",
             {"localsgd": {"k_steps": 2, "overlap": True, "outer_momentum": 0.5, "outer_lr": 0.7}}),
    Scenario("localsgd, amp float16, gradient_merge",
             {"localsgd": {"k_steps": 2}, "amp": FP16, "gradient_merge": MERGE}, tolerance=2e-2),
    Scenario("adaptive_localsgd", {"adaptive_localsgd": {"max_k_steps": 4}}, waits=2, tolerance=1e-6,
             why="may the update be applied? What is the loss, which decides the next period?"),
    Scenario("dgc", {"dgc": {"sparsity": [0.9]}}, tolerance=1e-5),
    Scenario("pipeline", {"pipeline": PIPELINE}, tolerance=1e-6),
    Scenario("pipeline, amp float16, lamb, clip", {"pipeline": PIPELINE, "amp": FP16, "lamb": True, "clip": CLIP},
             adam=True, tolerance=2e-2),
    Scenario("dgc, float16 values, clip_norm, amp float16",
             {"dgc": {"sparsity": [0.99], "value_dtype": "float16", "clip_norm": 0.1}, "amp": FP16}, tolerance=2e-2),
]  # fmt: skip

RANKS = 8
SEGMENTS = {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["0", "1", "2"]}
STAGE3 = {"stage": 3, **SEGMENTS}
HOSTS = {**STAGE3, "sharding_degree": 2, "hybrid_dp": True}
SHARDING = [
    Scenario("sharding stage 1", {"sharding": SEGMENTS}),
    Scenario("sharding stage 3 on hosts of 2", {"sharding": HOSTS}),
    Scenario("sharding stage 3 on hosts of 2, fp16_allreduce", {"sharding": HOSTS, "fp16_allreduce": True}),
    Scenario("sharding stage 3 on hosts of 2, localsgd", {"sharding": HOSTS, "localsgd": {"k_steps": 2}}),
    Scenario("sharding stage 3, lamb, amp float16, recompute, clip",
             {"sharding": STAGE3, "lamb": True, "amp": FP16, "recompute": BLOCKS, "clip": CLIP}, adam=True),
]  # fmt: skip
