"""`FleetTrainer`: transformers' `Trainer` with a `DistributedStrategy`.

The Trainer keeps its loop, data, logs, evaluation and schedule. fleetx takes over in four places: where the Trainer
would wrap the model (`Accelerator.prepare`), and in its backward, its steps and its checkpoints.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import sort_checkpoints

from fleetx import fleet
from fleetx.comm.session import current
from fleetx.errors import UsageError
from fleetx.integrations.training_arguments import strategy_for
from fleetx.strategy import DistributedStrategy

STATE = "fleetx"  # the folder in checkpoint-N that fleet.save writes


class FleetTrainer(Trainer):
    """A `Trainer` that trains with a strategy. To extend another Trainer class: `class Mine(FleetTrainer, Other)`.

    strategy: what to train with. `fp16`, `bf16`, `max_grad_norm` and `gradient_accumulation_steps` of the arguments
        become amp, clip and gradient_merge, unless the strategy declares those itself.
    """

    accelerator: _Accelerator
    model: nn.Module
    optimizer: Optimizer

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *arguments: Any,
        strategy: DistributedStrategy | None = None,
        **keywords: Any,
    ):
        fleet.init()
        args = args if args is not None else TrainingArguments("tmp_trainer")
        self.strategy = strategy_for(args, strategy or current().strategy or DistributedStrategy())
        self.updated = True  # whether the Trainer's last update changed the parameters
        self._distributed: tuple[nn.Module, Optimizer] | None = None
        self._gathered: dict[str, Tensor] | None = None  # the state of a sharded model, while rank 0 saves it
        super().__init__(model, args, *arguments, **keywords)
        self.callback_handler.callbacks.insert(0, _AfterStep(self))  # before callbacks that look at the parameters

    # --- set-up -----------------------------------------------------------------------------------
    def _build_accelerator_args(self, **keywords: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**keywords), "mixed_precision": "no"}  # amp does that

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _Accelerator  # the Trainer hard-codes the class that it creates
        self.accelerator.trainer = self
        if (seen := self.accelerator.num_processes) != fleet.worker_num():
            raise UsageError(
                f"accelerate, which divides the Trainer's data, sees {seen} of {fleet.worker_num()} workers: start the "
                "script with fleetrun or torchrun, and on CPUs set use_cpu=True in TrainingArguments"
            )
        if (device := self.args.device).type != fleet.device().type:
            raise UsageError(
                f"the Trainer uses {device}, but fleetx {fleet.device()}: set use_cpu=True in TrainingArguments, or "
                "FLEETX_DEVICE=cuda"
            )

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> None:
        if self._distributed is not None:
            if self._distributed[0] is model and self._distributed[1] is optimizer:
                return  # train() was called again
            fleet.release(self._distributed[0])  # model_init created a new model
        fleet.distribute(model, optimizer, self.strategy)
        self._distributed = model, optimizer

    # --- steps ------------------------------------------------------------------------------------
    def training_step(self, *arguments: Any, **keywords: Any) -> Tensor:
        loss = super().training_step(*arguments, **keywords)
        if not self.accelerator.sync_gradients:  # the Trainer itself steps only after the last batch of a window
            self.optimizer.step()
            if fleet.updated:
                raise UsageError(
                    "the data ended inside an accumulated batch, so that gradient_merge updated before the Trainer: "
                    "give the dataset a length, or a number of batches that gradient_accumulation_steps divides"
                )
        return loss

    def stepped(self) -> None:
        """Called after each step of the Trainer. Flushes if the last batches of an epoch are too few for a window."""
        self.updated = fleet.flush(optimizer=self.optimizer) if self._short_window() else fleet.updated

    def _short_window(self) -> bool:
        return self.current_gradient_accumulation_steps < self.args.gradient_accumulation_steps

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """A no-op: `clip` does it, after the reduction."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor | None:
        if self._short_window():
            return None  # not reduced yet
        norm = nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        fleet.flush(optimizer=self.optimizer)
        return super()._finalize_training(*arguments, **keywords)

    # --- checkpoints ------------------------------------------------------------------------------
    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """As in Trainer. True resumes from the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest(str(self.args.output_dir))
        return super().train(resume_from_checkpoint, *arguments, **keywords)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer: `from_pretrained` can read the result. Every worker must call it."""
        self._gathered = _whole(self.model) if _divided(self.model) else None
        super().save_model(output_dir, _internal_call)
        self._gathered = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self._gathered if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir, STATE)
        fleet.save(folder, model=self.model, scheduler=self.lr_scheduler, step=self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Only check the folder: the model is loaded below, with the optimizer, after it is distributed."""
        if not Path(resume_from_checkpoint).is_dir():
            raise UsageError(f"there is no folder {resume_from_checkpoint}: pass a folder checkpoint-N, or True")
        if not Path(resume_from_checkpoint, STATE).is_dir():
            raise UsageError(
                f"{resume_from_checkpoint} has no folder {STATE!r}: it was saved by another Trainer or with "
                "save_only_model=True, and cannot be resumed. Load its model with from_pretrained, and call train() "
                "without resume_from_checkpoint"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            fleet.load(Path(checkpoint, STATE), model=self.model, scheduler=self.lr_scheduler)

    def _load_best_model(self) -> None:
        """Also load into a sharded model."""
        if not _divided(self.model):
            return super()._load_best_model()
        values: dict[str, Any] = {}
        for file in sorted(Path(str(self.state.best_model_checkpoint)).glob("*.safetensors")):
            values |= load_file(file)
        set_model_state_dict(self.model, values, options=StateDictOptions(full_state_dict=True, strict=False))


class _Accelerator(Accelerator):
    """Splits the data, as in a plain Trainer, and leaves the model and the optimizer to fleetx."""

    trainer: FleetTrainer

    def prepare(self, *given: Any, device_placement: list[bool] | None = None) -> Any:
        if not any(isinstance(each, nn.Module | Optimizer) for each in given):
            return super().prepare(*given, device_placement=device_placement)
        model, optimizer = given
        self.trainer.distribute(model, optimizer)
        return given

    def prepare_model(self, model: nn.Module, *arguments: Any, **keywords: Any) -> nn.Module:
        return model

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        fleet.backward(loss, optimizer=self.trainer.optimizer)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        return not self.trainer.updated


class _AfterStep(TrainerCallback):
    def __init__(self, trainer: FleetTrainer):
        self._trainer = trainer

    def on_optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
        self._trainer.stepped()


def _newest(output_dir: str) -> str:
    """The newest complete checkpoint. A killed run may leave an incomplete one: `trainer_state.json` comes last."""
    for folder in reversed(sort_checkpoints(output_dir)):
        if os.path.isfile(os.path.join(folder, "trainer_state.json")):
            return folder
    raise UsageError(f"there is no complete checkpoint in {output_dir}: call train() without resume_from_checkpoint")


def _divided(model: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a sharded model, gathered on rank 0."""
    found = {}
    for name, value in model.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if fleet.is_first_worker():
            found[name] = value.cpu()
    return found
