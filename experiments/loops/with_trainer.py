"""Hugging Face Trainer, stock on one process and balanced on ranks."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from heterog.balance.for_trainer import BalancedTrainer
from heterog.balance.shares import SampleBatches
from loops.cases import (
    BATCH,
    NUM_BATCHES,
    RATE,
    SEED,
    SHARES,
    Case,
    Critic,
    Record,
    Samples,
    make_model,
    make_optimizer,
    make_schedule,
    weights_of,
)


class _Order(BatchSampler):
    """Whole batches of the same samples as the ranks have together."""

    def __init__(self, num_samples: int) -> None:
        self._batches = SampleBatches(num_samples, BATCH, seed=SEED, shuffle=True, drop_last=False)
        self._epoch = 0

    def __len__(self) -> int:
        return self._batches.num_steps(0)

    def __iter__(self) -> Any:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return (self._batches.batch(epoch, step).tolist() for step in range(len(self)))


class _StockTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer on one process; only the order of samples is not its own."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.train_dataset,
            batch_sampler=_Order(len(self.train_dataset)),
            collate_fn=self.data_collator,
        )


class _Interferes(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Freezes the first layer after some updates, or leaves each pass early."""

    def __init__(self, case: Case, net: Any) -> None:
        self._case, self._net = case, net

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called after an update."""
        if self._case.freeze_after == state.global_step:
            self._net.first.requires_grad_(False)
        if self._case.limit:
            control.should_epoch_stop = state.global_step % self._case.limit == 0
            control.should_training_stop = state.global_step == NUM_BATCHES


def alone(case: Case, record: Record, folder: str) -> list[Tensor]:
    """Stock Trainer, without a break."""
    return _train(case, record, folder, case.num_updates, balanced=False)


def on_ranks(case: Case, record: Record, folder: str) -> list[Tensor]:
    """Balanced Trainer, or two of them where a job resumes."""
    if case.resume_after:
        _train(case, record, folder, case.resume_after, balanced=True)
        checkpoint = str(Path(folder) / f"checkpoint-{case.resume_after}")
        return _train(case, record, folder, case.num_updates, balanced=True, resume=checkpoint)
    return _train(case, record, folder, case.num_updates, balanced=True)


def _train(
    case: Case,
    record: Record,
    folder: str,
    num_updates: int,
    *,
    balanced: bool,
    resume: str | None = None,
) -> list[Tensor]:
    net = make_model(case, record)
    optimizer = make_optimizer(net)
    schedule = make_schedule(case, optimizer) or LambdaLR(optimizer, lambda _: 1.0)
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH // len(SHARES) if balanced else BATCH,
        gradient_accumulation_steps=case.accumulate,
        max_steps=-1 if case.limit else num_updates,
        num_train_epochs=NUM_BATCHES if case.limit else 3,
        learning_rate=RATE,
        max_grad_norm=0,
        report_to=[],
        save_strategy="steps" if case.resume_after else "no",
        save_steps=case.resume_after or 500,
        eval_strategy="steps" if case.validate_every else "no",
        eval_steps=case.validate_every or None,
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=SEED,
        data_seed=SEED,
        ddp_find_unused_parameters=case.freeze_after > 0,
    )
    given: dict[str, Any] = {
        "model": net,
        "args": arguments,
        "train_dataset": Samples(case, case.num_samples),
        "eval_dataset": Samples(case, 19, seed=2),
        "optimizers": (optimizer, schedule),
        "callbacks": [_Interferes(case, net)],
    }
    if balanced:
        trainer: Trainer = BalancedTrainer(**given, balance={"shares": SHARES, "interval": 0})
    else:
        trainer = _StockTrainer(**given)
    trainer.train(resume_from_checkpoint=resume)
    return weights_of(net, Critic())
