"""Models that capture refuses, each beside a version changed as the message advises."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as pyg

from families.family import BATCH, FLOAT32, Batch, Family, enter, sgd, trained
from families.found import features_and_classes
from families.graphs import NODES, edges_of_batch
from families.language import VOCABULARY, config_of, hugging_face, padded_batch
from families.training import numbers

CLASSES = 4
PLACES, KEPT = 8, 3


def graphs() -> Batch:
    """Nodes and edges of a batch of graphs, the graph of each node, and a class for each graph."""
    nodes = torch.randn(BATCH * NODES, 6, dtype=torch.float64)
    graph = torch.arange(BATCH * NODES) // NODES
    return nodes, edges_of_batch(), graph, torch.randint(0, CLASSES, (BATCH,))


class Pooled(nn.Module):
    """Nodes that see their neighbours, and the mean over each graph."""

    def __init__(self, *, counted: bool) -> None:
        super().__init__()
        self.layer, self.head = pyg.SAGEConv(6, 8), nn.Linear(8, CLASSES)
        self.counted = counted

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor, classes: Tensor) -> Tensor:
        found = self.layer(nodes, edges).tanh()
        size = int(graph.max()) + 1 if self.counted else classes.shape[0]
        return functional.cross_entropy(
            self.head(pyg.global_mean_pool(found, graph, size=size)), classes
        )


WHOLE = {0: None, 1: None, 2: None}


def normed(momentum: float | None) -> nn.Module:
    """A network with one BatchNorm."""
    norm = nn.BatchNorm1d(16, momentum=momentum)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, CLASSES)).double()


def video_model() -> nn.Module:
    """A small VideoMAE whose loss rebuilds what is hidden."""
    return transformers.VideoMAEForPreTraining(
        transformers.VideoMAEConfig(
            image_size=8, patch_size=4, num_frames=4, tubelet_size=2, hidden_size=16,
            num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            decoder_num_attention_heads=2, decoder_hidden_size=16, decoder_num_hidden_layers=1,
            decoder_intermediate_size=16, norm_pix_loss=False, initializer_range=0.2,
        )
    )  # fmt: skip


def videos() -> tuple[Tensor, Tensor, Tensor]:
    """Frames, and for each video an order of its patches: the first ones are seen."""
    order = torch.stack([torch.randperm(PLACES) for _ in range(BATCH)])
    return torch.randn(BATCH, 4, 3, 8, 8), order[:, :KEPT], order[:, KEPT:]


def _video_masks_batch() -> Batch:
    frames, _, hidden = videos()
    return frames, torch.zeros(BATCH, PLACES).scatter(1, hidden, 1.0).bool()


@trained(
    "video_masks",
    lambda: {"model": video_model()},
    _video_masks_batch,
    refused="take them with torch.gather",
    dtype=None,
)
def video_masks(net: Any, frames: Tensor, hidden: Tensor) -> Tensor:
    """Refused: a mask as an index."""
    return net.model(pixel_values=frames, bool_masked_pos=hidden).loss


def _taken(rows: Tensor, places: Tensor) -> Tensor:
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[2]))


@trained("video_places", lambda: {"model": video_model()}, videos, tolerance=FLOAT32, dtype=None)
def video_places(net: Any, frames: Tensor, seen: Tensor, hidden: Tensor) -> Tensor:
    """The places of patches that are seen, and of those to rebuild."""
    made: Any = net.model
    patches = _taken(made.videomae.embeddings(frames, None), seen)
    states = made.encoder_to_decoder(made.videomae.encoder(patches).last_hidden_state)
    table = made.position_embeddings.expand(len(frames), -1, -1).type_as(states)
    blank = made.mask_token + _taken(table, hidden)
    found = made.decoder(torch.cat([states + _taken(table, seen), blank], 1), hidden.shape[1])
    pixels = frames.reshape(-1, 2, 2, 3, 2, 4, 2, 4).permute(0, 1, 4, 6, 2, 5, 7, 3)
    return functional.mse_loss(found.logits, _taken(pixels.flatten(4).flatten(1, 3), hidden))


def _time_series_batch() -> Batch:
    shapes = (8,), (8, 1), (4,), (4, 1)
    return tuple(numbers(*shape).float() for shape in shapes)


@trained(
    "time_series",
    lambda: {
        "model": transformers.TimeSeriesTransformerForPrediction(
            transformers.TimeSeriesTransformerConfig(
                prediction_length=4,
                context_length=6,
                lags_sequence=[1, 2],
                num_time_features=1,
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=16,
                decoder_ffn_dim=16,
                dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                encoder_layerdrop=0.0,
                decoder_layerdrop=0.0,
            )
        )
    },
    _time_series_batch,
    tolerance=FLOAT32,
    dtype=None,
)
def time_series(net: Any, past: Tensor, times: Tensor, future: Tensor, later: Tensor) -> Tensor:
    """What the refusal of Autoformer advises instead."""
    made = net.model(past_values=past, past_time_features=times,
                      past_observed_mask=torch.ones_like(past), future_values=future,
                      future_time_features=later)  # fmt: skip
    return made.loss


def _spectra() -> Batch:
    spectra = torch.randn(BATCH, 6, 4)
    given = functional.pad(spectra[:, 1::2], (0, 0, 1, 0))[:, :3]
    spectra[:, 4:] = -100.0  # as many of each: BatchNorm's local groups weigh by samples
    return torch.randint(4, 20, (BATCH, 5)), given, spectra, torch.randn(BATCH, 8)


@trained(
    "speech_spectra",
    lambda: {
        "model": transformers.SpeechT5ForTextToSpeech(
            transformers.SpeechT5Config(
                vocab_size=20, hidden_size=16, encoder_layers=1, decoder_layers=1,
                encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
                decoder_ffn_dim=16, num_mel_bins=4, speech_decoder_prenet_units=8,
                speech_decoder_postnet_units=8, speaker_embedding_dim=8, encoder_layerdrop=0.0,
                decoder_layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0,
                activation_dropout=0.0, positional_dropout=0.0,
                speech_decoder_prenet_dropout=0.0, speech_decoder_postnet_dropout=0.0,
            )
        )
    },
    _spectra,
    optimizer_options={"lr": 0.01},
    tolerance=FLOAT32,
    dtype=None,
)  # fmt: skip
def speech_spectra(
    net: Any, words: Tensor, given: Tensor, spectra: Tensor, speaker: Tensor
) -> Tensor:
    """SpeechT5 without layer drop, whose loss is a sum over products with a mask.

    The refusal of SpeechT5's own loss advises it.
    """
    kept = (spectra != -100).float()
    states = net.model.speecht5(words, decoder_input_values=given, speaker_embeddings=speaker)[0]
    before, after, _ = net.model.speech_decoder_postnet(states)
    return (((before - spectra).abs() + (after - spectra).abs()) * kept).sum() / kept.sum()


class Queue(nn.Module):
    """MoCo: keys of earlier batches in a buffer that goes round, from a network that follows."""

    place: Tensor
    keys: Tensor

    def __init__(self, *, reads_place: bool, size: int = 3 * BATCH) -> None:
        super().__init__()
        self.reads_place = reads_place
        self.query, self.key = nn.Linear(8, 6), nn.Linear(8, 6)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("keys", functional.normalize(torch.randn(size, 6), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        found = functional.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for old, new in zip(self.key.parameters(), self.query.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            made = functional.normalize(self.key(other), dim=1)
        near = torch.cat([(found * made).sum(1, keepdim=True), found @ self.keys.clone().T], 1)
        loss = functional.cross_entropy(near / 0.2, torch.zeros(len(one), dtype=torch.long))
        with torch.no_grad():
            self._keep(made)
        return loss

    def _keep(self, made: Tensor) -> None:
        number, size = len(made), len(self.keys)
        if self.reads_place:
            place = int(self.place)
            self.keys[place : place + number] = made
        else:
            self.keys.index_copy_(0, (self.place + torch.arange(number)) % size, made)
        self.place.copy_((self.place + number) % size)


def _words_batch() -> Batch:
    return torch.randint(0, VOCABULARY, (2, BATCH)).unbind()


def _adaptive_parts() -> dict[str, nn.Module]:
    head = nn.AdaptiveLogSoftmaxWithLoss(8, VOCABULARY, [10, 30])
    return {"body": nn.Embedding(VOCABULARY, 8), "head": head}


@trained("adaptive_softmax", _adaptive_parts, _words_batch, refused="head.log_prob(x)")
def adaptive_softmax(net: Any, words: Tensor, following: Tensor) -> Tensor:
    """Refused: each cluster of words is computed for the samples that have one of them."""
    return net.head(net.body(words), following).loss


@trained("adaptive_log_prob", _adaptive_parts, _words_batch)
def adaptive_log_prob(net: Any, words: Tensor, following: Tensor) -> Tensor:
    """The same loss, of all words."""
    return functional.nll_loss(net.head.log_prob(net.body(words)), following)


enter(
    Family(
        "queue_at_a_number",
        "Refused: the place in a queue is read.",
        lambda: sgd(lambda: Queue(reads_place=True).double(), lambda: (numbers(8), numbers(8))),
        refused="buffer.index_copy_",
    ),
    Family(
        "queue_at_a_tensor",
        "The place in a queue stays a tensor.",
        lambda: sgd(lambda: Queue(reads_place=False).double(), lambda: (numbers(8), numbers(8))),
    ),
    Family(
        "graphs_counted",
        "Refused: the number of graphs is one more than the largest.",
        lambda: sgd(lambda: Pooled(counted=True).double(), graphs, batch_dims=WHOLE),
        refused="labels.shape[0], mask.shape[1]",
    ),
    Family(
        "graphs_of_labels",
        "There are as many graphs as labels.",
        lambda: sgd(lambda: Pooled(counted=False).double(), graphs, batch_dims=WHOLE),
    ),
    Family(
        "norm_of_all_steps",
        "Refused: a mean over all steps so far.",
        lambda: sgd(lambda: normed(None), features_and_classes, loss=functional.cross_entropy),
        refused="Give it a momentum",
    ),
    Family(
        "norm_with_momentum",
        "The moving average of BatchNorm.",
        lambda: sgd(lambda: normed(0.1), features_and_classes, loss=functional.cross_entropy),
    ),
    Family(
        "long_t5",
        "What the refusal of LED advises: an encoder of local attention, and a decoder.",
        lambda: hugging_face(
            lambda: config_of(
                "LongT5",
                vocab_size=VOCABULARY,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=1,
                num_decoder_layers=1,
                num_heads=2,
                local_radius=3,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                initializer_factor=1.0,
            ),
            "LongT5ForConditionalGeneration",
            padded_batch,
        ),
        tolerance=FLOAT32,
    ),
)
