"""Lightning on ranks."""

from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from heterog.balance.for_lightning import LightningBalancer
from loops.cases import (
    BATCH,
    NUM_BATCHES,
    SEED,
    SHARES,
    Case,
    Critic,
    Record,
    Samples,
    data_of,
    labels_that_count,
    make_model,
    make_optimizer,
    make_schedule,
    weights_of,
)


class Module(LightningModule):
    """The model of a case."""

    def __init__(self, case: Case, record: Record, balancer: LightningBalancer) -> None:
        super().__init__()
        self.case, self.balancer = case, balancer
        self.net = make_model(case, record)
        if case.optimizers == 2:
            self.critic = Critic()
        self.automatic_optimization = case.optimizers == 1
        self.num_done = self.num_validated = 0

    def training_step(self, batch: Any, index: int) -> Any:
        """The loss of a batch, or an update of two optimizers."""
        self.num_done += 1
        if self.case.freeze_after and self.num_done > self.case.freeze_after:
            self.net.first.requires_grad_(False)
        found = self.net(**batch)
        if self.automatic_optimization:
            return {"loss": found["loss"], "count": labels_that_count(self.case, batch)}
        losses = found["loss"], self.critic(found["logits"].detach())
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            self.manual_backward(self.balancer.weigh(loss))
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: Any, index: int) -> None:
        """Count the samples."""
        self.num_validated += len(batch["ids"])

    def configure_optimizers(self) -> Any:
        """The optimizers of a case, and a schedule by updates."""
        optimizer = make_optimizer(self.net)
        if self.case.optimizers == 2:
            return [optimizer, make_optimizer(self.critic)], []
        schedule = make_schedule(self.case, optimizer)
        if schedule is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def on_ranks(case: Case, record: Record, folder: str) -> list[Tensor]:
    """One fit, or two where a job resumes from its checkpoint."""
    path = None
    if case.resume_after:
        saving = ModelCheckpoint(
            dirpath=folder, filename="saved", every_n_train_steps=case.resume_after
        )
        _fit(case, record, saving, num_updates=case.resume_after)
        path = str(Path(folder) / "saved.ckpt")
    module = _fit(case, record, num_updates=case.num_updates * case.optimizers, path=path)
    assert not case.validate_every or module.num_validated > 0
    return weights_of(module.net, module.critic if case.optimizers == 2 else Critic())


def _fit(
    case: Case, record: Record, *callbacks: Callback, num_updates: int, path: str | None = None
) -> Module:
    balancer = LightningBalancer(global_batch_size=BATCH, shares=SHARES, interval=0)
    module = Module(case, record, balancer)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp" if case.optimizers == 1 and not case.freeze_after else _FINDS_UNUSED,
        callbacks=[balancer, *callbacks],
        max_steps=num_updates,
        max_epochs=NUM_BATCHES,
        accumulate_grad_batches=case.accumulate,
        limit_train_batches=case.limit or 1.0,
        val_check_interval=case.validate_every or None,
        num_sanity_val_steps=2 if case.validate_every else 0,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = balancer.loader(data_of(case), seed=SEED)
    val = DataLoader(Samples(case, 19, seed=2), batch_size=5) if case.validate_every else None
    trainer.fit(module, data, val, ckpt_path=path, weights_only=False)
    return module


_FINDS_UNUSED = "ddp_find_unused_parameters_true"
