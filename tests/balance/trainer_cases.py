"""Models and losses for ``BalancedTrainer``: a script that trains each for two updates.

Run by ``test_trainer_losses`` on one process and on two; prints weights, or why it was refused.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import TrainingArguments

from heterog.balance.for_trainer import BalancedTrainer
from heterog.balance.shares import BalanceError
from heterog.errors import HeterogWarning

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
PADDING = -100


class Sentences(Dataset[dict[str, Any]]):
    """Sentences of unequal lengths, and what a function of their words makes labels of."""

    def __init__(self, label: Callable[[Tensor], dict[str, Any]]) -> None:
        random = torch.Generator().manual_seed(5)
        lengths = torch.randint(3, 13, (30,), generator=random).tolist()
        self.words = [torch.randint(3, 40, (n,), generator=random) for n in lengths]
        self.label = label

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.words[index]
        return {"input_ids": words, **self.label(words)}


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad words with 0 and labels of words with -100."""
    words = [each["input_ids"] for each in samples]
    if "end_positions" in samples[0]:  # whose loss also looks at padding
        words = [functional.pad(each, (0, 12 - len(each)), value=2) for each in words]
    batch = {
        "input_ids": nn.utils.rnn.pad_sequence(words, True),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(n) for n in words], True),
    }
    for name in samples[0].keys() - {"input_ids"}:
        labels = [torch.as_tensor(each[name]) for each in samples]
        is_of_words = name == "labels" and labels[0].dim() and len(labels[0]) == len(words[0])
        batch[name] = (
            nn.utils.rnn.pad_sequence(labels, True, PADDING)
            if is_of_words
            else torch.stack(labels)
        )
    return batch


class Net(nn.Module):
    """A model of one's own: a loss of its logits and labels."""

    def __init__(self, loss: Callable[..., Tensor], *, pooled: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        self.loss, self.pooled = loss, pooled

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Any:
        hidden = self.embed(input_ids)
        if self.pooled:
            hidden = (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1)[:, None]
        logits = self.head(hidden)
        loss = {} if labels is None else {"loss": self.loss(logits, labels, attention_mask)}
        return {**loss, "logits": logits}


def token_mean(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted_mean(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return token_mean(logits[:, :-1], labels[:, 1:], mask)


def masked_mean(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    each = functional.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


def mean_of_means(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    each = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (each.sum(1) / (labels != PADDING).sum(1)).mean()


def total(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100


def both(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return token_mean(logits, labels, mask) + mean_of_means(logits, labels, mask)


def across(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    scores = logits @ logits.T
    return functional.cross_entropy(scores, torch.arange(len(scores)))


WEIGHTS = torch.linspace(1, 3, 40)


def padded_mean(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return functional.mse_loss(logits[..., 0].sigmoid() * mask, (labels > 15).float())


def weighted(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, WEIGHTS)


def divided(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs["logits"]
    count: Tensor = (labels != PADDING).sum() / num_items_in_batch
    return token_mean(logits, labels, labels) * count


def undivided(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
    return token_mean(outputs["logits"], labels, labels)


class OwnLoss(BalancedTrainer):
    """A Trainer with a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class OwnStep(BalancedTrainer):
    """A Trainer with a step of its own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss: Tensor = self.loss_of(model, inputs, num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def loss_of(self, model: Any, inputs: Any, num_items: Any) -> Any:
        return self.compute_loss(model, inputs, num_items_in_batch=num_items)


class DirectStep(OwnStep):
    """Its loss is not that of ``compute_loss``."""

    def loss_of(self, model: Any, inputs: Any, num_items: Any) -> Any:
        return model(**inputs).loss


def bert(kind: str, **options: Any) -> Callable[[], Any]:
    """A model of Transformers, which imports each of its files where it is used."""
    return lambda: getattr(transformers, kind)(transformers.BertConfig(**BERT, **options))


def llama(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, kind)(transformers.LlamaConfig(**LLAMA, **options))


def words(each: Tensor) -> dict[str, Any]:
    return {"labels": each}


def kind_of(each: Tensor) -> dict[str, Any]:
    return {"labels": int(each.sum()) % 2}


def number(each: Tensor) -> dict[str, Any]:
    return {"labels": float(each.sum()) / 100}


def several(each: Tensor) -> dict[str, Any]:
    return {"labels": [float(each.sum() % 2), float(len(each) % 2), 1.0]}


def span(each: Tensor) -> dict[str, Any]:
    return {"start_positions": int(each[0]) % 3, "end_positions": 2}


def mixtral() -> Any:
    options = {"num_local_experts": 4, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, **options))


Case = tuple[Callable[[], Any], Callable[[Tensor], dict[str, Any]], dict[str, Any]]
SEQUENCE = llama("LlamaForSequenceClassification", num_labels=2)
CASES: dict[str, Case] = {
    "sequence": (SEQUENCE, kind_of, {}),
    "sequence accumulated": (SEQUENCE, kind_of, {"gradient_accumulation_steps": 2}),
    "sequence smoothed": (SEQUENCE, kind_of, {"label_smoothing_factor": 0.1}),
    "sequence bert": (bert("BertForSequenceClassification", num_labels=2), kind_of, {}),
    "tokens": (
        bert("BertForTokenClassification", num_labels=2),
        lambda each: {"labels": each % 2},
        {},
    ),
    "causal": (llama("LlamaForCausalLM"), words, {}),
    "causal accumulated": (llama("LlamaForCausalLM"), words, {"gradient_accumulation_steps": 2}),
    "causal grouped": (
        llama("LlamaForCausalLM"),
        words,
        {"train_sampling_strategy": "group_by_length"},
    ),
    "causal smoothed": (llama("LlamaForCausalLM"), words, {"label_smoothing_factor": 0.1}),
    "regression": (bert("BertForSequenceClassification", num_labels=1), number, {}),
    "several labels": (
        bert(
            "BertForSequenceClassification",
            num_labels=3,
            problem_type="multi_label_classification",
        ),
        several,
        {},
    ),
    "question": (bert("BertForQuestionAnswering"), span, {}),
    "own tokens": (lambda: Net(token_mean), words, {}),
    "own tokens accumulated": (
        lambda: Net(token_mean),
        words,
        {"gradient_accumulation_steps": 2},
    ),
    "own shifted": (lambda: Net(shifted_mean), words, {}),
    "own mask": (lambda: Net(masked_mean), words, {}),
    "own samples": (lambda: Net(mean_of_means), words, {}),
    "own sum": (lambda: Net(total), words, {}),
    "own sequential": (
        lambda: Net(token_mean),
        words,
        {"train_sampling_strategy": "sequential"},
    ),
    "function divides": (
        lambda: Net(token_mean),
        words,
        {"compute_loss_func": divided},
    ),
    "function ignores": (
        lambda: Net(token_mean),
        words,
        {"compute_loss_func": undivided, "gradient_accumulation_steps": 2},
    ),
    "own loss": (SEQUENCE, kind_of, {"type": OwnLoss}),
    "own step": (SEQUENCE, kind_of, {"type": OwnStep}),
    "direct step": (SEQUENCE, kind_of, {"type": DirectStep}),
    "noise": (SEQUENCE, kind_of, {"neftune_noise_alpha": 5.0}),
    "refused: experts": (mixtral, words, {}),
    "refused: two means": (lambda: Net(both), words, {}),
    "refused: across": (lambda: Net(across, pooled=True), kind_of, {}),
    "unlike padding": (lambda: Net(padded_mean), words, {}),
    "refused: weighted": (lambda: Net(weighted, pooled=True), kind_of, {}),
    "weighted": (
        lambda: Net(weighted, pooled=True),
        kind_of,
        {"loss_mean_over": lambda batch: WEIGHTS[batch["labels"]].sum()},
    ),
}


def run(name: str, shares: list[int]) -> Any:
    """Weights after two updates and the mean loss, or the text of a refusal or warning."""
    make, label, options = CASES[name]
    options = dict(options)
    torch.manual_seed(0)
    model = make()
    size = sum(shares)
    ours = {
        key: options.pop(key) for key in ("loss_mean_over", "compute_loss_func") if key in options
    }
    kind = options.pop("type", BalancedTrainer)
    arguments = TrainingArguments(
        output_dir=os.environ["FOLDER"],
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=size // WORLD,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        ddp_find_unused_parameters=False,
        **options,
    )
    balance = {"shares": shares if WORLD > 1 else [size], "interval": 0}
    with warnings.catch_warnings(record=True) as told:
        trainer = kind(
            model,
            arguments,
            train_dataset=Sentences(label),
            data_collator=collate,
            balance=balance,
            **ours,
        )
    try:
        loss = trainer.train().training_loss
    except BalanceError as error:
        return str(error)
    for each in told:
        if issubclass(each.category, HeterogWarning):
            return str(each.message)
    weights = [each.detach().flatten() for each in model.parameters()]
    return torch.cat([*weights, torch.tensor([loss])])


if __name__ == "__main__":
    shares = json.loads(os.environ.get("SHARES", "[6, 2]"))
    warnings.simplefilter("always", HeterogWarning)
    names = os.environ["CASES"].split(",") if os.environ["CASES"] else list(CASES)
    found = {name: run(name, shares) for name in names}
    torch.save(found, f"{os.environ['FOLDER']}/found.{WORLD}.{os.environ.get('RANK', 0)}")
    sys.stdout.flush()
