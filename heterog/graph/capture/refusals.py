"""What a refused step says: one line with module and line of code, and the way out."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from heterog.errors import CaptureError
from heterog.graph.capture.places import OpenModules, is_users
from heterog.graph.workload import Workload

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


@contextmanager
def clear_errors(workload: Workload, modules: "OpenModules | None") -> Iterator[None]:
    """Convert errors of tracing to one line that names module, line and the way out."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        frame = _users_frame(error)
        where = f"{frame.filename}:{frame.lineno} (`{frame.line}`)" if frame else _place(error)
        module = modules.innermost if modules else "making the model or its batch"
        if isinstance(error, DATA_DEPENDENT):
            raise CaptureError(
                f"workload '{workload.name}': {module} depends on tensor values at {where}. "
                f"A plan needs static shapes: {_way_out(error, frame)}"
            ) from error
        message = str(error).strip().splitlines()
        raise CaptureError(
            f"workload '{workload.name}': the training step fails in {module} at {where}: "
            f"{type(error).__name__}: {message[0] if message else 'no message'}"
        ) from error


_WAYS_OUT = (
    (
        "/torch_geometric/utils/loop.py",
        "how many self loops a graph has is such a value. Add or remove them in the data once "
        "(torch_geometric.transforms.AddSelfLoops); layers that add them have "
        "add_self_loops=False.",
    ),
    (
        "/torch_geometric/",
        "pass the number of nodes or graphs where it is counted otherwise (size=labels.shape[0] "
        "of a pooling layer, dim_size, num_nodes), and drop nodes or edges from the data, not in "
        "the model.",
    ),
    *(
        (
            f"/transformers/models/{name}/",
            "which tokens attend to all others is such a value, and no setting of this model "
            f"leaves the question out. {other} attends to neighbours as well, and can be planned.",
        )
        for name, other in (
            ("longformer", "ModernBERT (local_attention), or Mistral (sliding_window),"),
            ("led", "LongT5 (encoder_attention_type='local')"),
        )
    ),
    (
        "/transformers/models/videomae/",
        "a mask as an index gives as many patches as it has truths. Where all samples keep as "
        "many, pass the places of these and take them with torch.gather, in a copy of the "
        "embeddings and of the loss; VideoMAEForVideoClassification masks nothing.",
    ),
    (
        "/transformers/models/autoformer/",
        "by how many steps a series is delayed is such a value, and no setting of this model "
        "leaves the question out. TimeSeriesTransformer with encoder_layerdrop and "
        "decoder_layerdrop of 0 can be planned.",
    ),
    (
        "/transformers/models/speecht5/",
        "its loss of spectra picks what is no padding. Train with a loss of your own on "
        "speech_decoder_postnet(speecht5(...)[0]), as sums over products with the mask, divided "
        "by the sum of the mask; layer drop needs encoder_layerdrop=0 and decoder_layerdrop=0, "
        "drawn masks apply_spec_augment=False.",
    ),
    (
        "/transformers/",
        "choose eager attention or dense experts in the model's config, leave out what masks or "
        "drops at random (SpecAugment, LayerDrop), or take a head that does not pick elements by "
        "their values: computing with all of them and masking the result comes to the same.",
    ),
)
"""Advice by the library whose line cannot be captured; the first match counts."""


_WAYS_OUT_OF_OP = {
    "aten::_ctc_loss": (
        "CTC keeps a table that is as wide as the longest target, which torch reads from the "
        "values of target_lengths. Write its recursion over time with torch.logsumexp, on targets "
        "padded to one width, or train with another loss."
    ),
    "aten::bincount": (
        "bincount is as long as the largest value says. Sum functional.one_hot(labels, classes) "
        "over samples."
    ),
    "aten::repeat_interleave": (
        "how often rows are repeated are such values. Say how many come of it: output_size=n."
    ),
    "aten::_unique2": (
        "how many unlike values there are is such a value. Find them where the data is loaded, "
        "and pass each sample's place among them, with a number of places that is the same for "
        "all batches."
    ),
    "aten::_pack_padded_sequence": (
        "a packed sequence has as many steps as the values of lengths say. Run the layers on the "
        "padded batch; where states are read at the last step of each sample, take them from the "
        "outputs with gather, and mask what lies behind."
    ),
}
"""Advice for an op whose result has a shape that depends on values."""


_WAYS_OUT_OF_STATEMENT = {
    ("if ", "elif ", "while "): (
        "values decide there which ops run, and all steps of a plan run the same. Use "
        "torch.where, or settings with which the code always goes one way (no LayerDrop, say); an "
        "`if` that does nothing but raise an error may stay."
    ),
    ("assert ",): (
        "an assert may stay if it asks tensors, and needs each answer: leave out int() and "
        "float(), and write torch.logical_or instead of `or`."
    ),
}
"""Advice by the beginning of a line that asks for the truth of a tensor."""


def _way_out(error: BaseException, frame: traceback.FrameSummary | None) -> str:
    """Advice for code whose shapes depend on values."""
    op = getattr(error, "func", None)
    if isinstance(op, torch._ops.OpOverload) and op._schema.name in _WAYS_OUT_OF_OP:
        return _WAYS_OUT_OF_OP[op._schema.name]
    if _frames_in(error, "/torch/nn/modules/batchnorm.py"):
        return _OF_BATCH_NORM
    line = (frame.line or "") if frame else ""
    if isinstance(error, DataDependentOutputException):
        for words, advice in _WAYS_OUT_OF_STATEMENT.items():
            if line.startswith(words):
                return advice
    path = frame.filename.replace("\\", "/") if frame else ""
    for folder, advice in _WAYS_OUT:
        if folder in path:
            return advice
    if "one_hot(" in line:
        return "one_hot is as wide as the largest value says. Give it the number of classes."
    if ".max()" in line and ("int(" in line or "+ 1" in line):
        return _OF_NUMBER_OF_ROWS
    return (
        "avoid .item(), .tolist(), nonzero, masks as indices (x[mask]) and `if` on tensors there; "
        "torch.where or a product with the mask usually does the same."
    )


_OF_NUMBER_OF_ROWS = (
    "how many there are (graphs, nodes, words) is such a value. Take it from a shape "
    "(labels.shape[0], mask.shape[1]), or hand it in as a number, an entry of the batch that is "
    "no tensor."
)


_OF_BATCH_NORM = (
    "BatchNorm with momentum=None divides by the number of steps, which is such a value. Give it "
    "a momentum (0.1 is torch's own), for a moving average instead of the mean over all steps."
)


def _frames_in(error: BaseException, folder: str) -> list[traceback.FrameSummary]:
    """The frames of a folder in which an error came up."""
    frames = traceback.extract_tb(error.__traceback__)
    return [each for each in frames if folder in each.filename.replace("\\", "/")]


def _place(error: BaseException) -> str:
    """Where an error came up that no line of the user leads to."""
    return "its backward pass" if _frames_in(error, "/torch/autograd/") else "unknown line"


def _users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame that is neither torch's nor ours: the user's own line."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((each for each in reversed(frames) if is_users(each.filename)), None)


def check_hooks(workload: Workload, model: nn.Module) -> None:
    """Refuse hooks that run when a gradient is in ``.grad``, where a plan has none."""
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"workload '{workload.name}': '{name}' has a hook that runs after its gradient "
                "is accumulated, which no plan can call. Change gradients in a hook of the "
                "tensor (register_hook), and step optimizers outside of hooks."
            )
