"""Encoding tensors as messages of bytes, and decoding them.

``value`` defines what each codec keeps and the length of its messages. A message is one flat
``uint8`` tensor. Its parts are in order of falling element size, so that each is aligned:

    fp16    halves
    int8    scales (fp32), one for each block; elements
    top_k   kept values and their indices, or kept values and a bitmap

Values that are not finite stay so: diverged training must not look right.
"""

import torch
from torch import Tensor

from heterog.modes.codecs.value import INT8_BLOCK, Codec, CodecKind

_INT8_STEPS = 127.0  # steps on each side of 0
_MOST_HALF = 65504.0  # largest finite number in half precision


def encode(tensor: Tensor, codec: Codec) -> Tensor:
    """Encode a tensor as a message of ``codec.message_bytes`` bytes.

    Args:
        tensor: Tensor of floating-point numbers, not empty.
        codec: A codec for which the tensor is not plain; see ``Codec.is_plain``.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_meta:  # a rehearsal
        size = codec.message_bytes(flat.numel(), flat.element_size())
        return torch.empty(size, dtype=torch.uint8, device=flat.device)
    if codec.kind == CodecKind.FP16:
        return _as_bytes(_halves(flat))
    if codec.kind == CodecKind.INT8:
        return _steps(flat)
    return _largest(flat, codec)


def decode(message: Tensor, num_elements: int, dtype: torch.dtype, codec: Codec) -> Tensor:
    """Decode a message into a flat tensor.

    Args:
        message: A message from ``encode``.
        num_elements: Number of elements of the tensor.
        dtype: Dtype of the tensor.
        codec: The codec that encoded it.
    """
    if message.is_meta:
        return torch.empty(num_elements, dtype=dtype, device=message.device)
    if codec.kind == CodecKind.FP16:
        return message.view(torch.float16).to(dtype)
    if codec.kind == CodecKind.INT8:
        num_blocks = -(-num_elements // INT8_BLOCK)
        scales = message[: 4 * num_blocks].view(torch.float32)
        steps = message[4 * num_blocks :].view(torch.int8)
        flat = torch.empty(num_blocks, INT8_BLOCK, dtype=dtype, device=message.device)
        flat.view(-1)[:num_elements].copy_(steps)
        return flat.mul_(scales[:, None].to(dtype)).view(-1)[:num_elements]
    flat = torch.zeros(num_elements, dtype=dtype, device=message.device)
    values, where = _kept(message, num_elements, dtype, codec)
    flat[where] = values
    return flat


def add_decoded(total: Tensor, message: Tensor, codec: Codec) -> None:
    """Add a decoded message to a flat tensor; a sparse message changes few elements."""
    if message.is_meta:
        return
    if codec.kind == CodecKind.TOP_K:
        values, where = _kept(message, total.numel(), total.dtype, codec)
        total[where] += values
    else:
        total += decode(message, total.numel(), total.dtype, codec)


def _halves(flat: Tensor) -> Tensor:
    """Convert to half precision; finite values beyond its range are clipped to it."""
    half = flat.to(torch.float16)
    least, most = torch.aminmax(flat)
    if -_MOST_HALF <= least and most <= _MOST_HALF:
        return half
    return torch.where(half.isinf() & flat.isfinite(), half.sign() * _MOST_HALF, half)


def _steps(flat: Tensor) -> Tensor:
    """Scales of all blocks, followed by every element in steps of its block's scale."""
    num_elements = flat.numel()
    wide = flat.to(torch.float32)
    short = -num_elements % INT8_BLOCK
    if short:
        wide = torch.cat([wide, wide.new_zeros(short)])
    blocks = wide.view(-1, INT8_BLOCK)
    # Not the maximum of magnitudes, which would write all magnitudes to memory.
    scales = torch.maximum(blocks.amax(1), -blocks.amin(1)) / _INT8_STEPS
    factor = torch.where(scales > 0.0, 1.0 / scales, scales)
    steps = (blocks * factor[:, None]).round_().clamp_(-_INT8_STEPS, _INT8_STEPS).to(torch.int8)
    return torch.cat([_as_bytes(scales), _as_bytes(steps.view(-1)[:num_elements])])


def _largest(flat: Tensor, codec: Codec) -> Tensor:
    """The kept values, followed by their positions."""
    kept, has_bitmap = codec.kept(flat.numel(), flat.element_size())
    is_kept = _is_among_largest(flat, kept)
    where = is_kept.nonzero().view(-1)
    values = _as_bytes(flat[where])
    if has_bitmap:
        return torch.cat([values, _bits(is_kept)])
    indices = _as_bytes(where.to(torch.int32) if codec.index_bytes == 4 else where)
    wider_first = codec.index_bytes > flat.element_size()
    return torch.cat([indices, values] if wider_first else [values, indices])


def _is_among_largest(flat: Tensor, kept: int) -> Tensor:
    """Whether each element is among the ``kept`` largest magnitudes; ties go to the first."""
    magnitude = flat.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    smallest = magnitude.kthvalue(flat.numel() - kept + 1).values
    is_kept = magnitude > smallest
    ties = (magnitude == smallest).nonzero().view(-1)
    is_kept[ties[: kept - int(is_kept.sum())]] = True
    return is_kept


def _kept(
    message: Tensor, num_elements: int, dtype: torch.dtype, codec: Codec
) -> tuple[Tensor, Tensor]:
    """The values of a sparse message and their positions."""
    value_bytes = dtype.itemsize
    kept, has_bitmap = codec.kept(num_elements, value_bytes)
    if has_bitmap:
        values, bits = torch.split_with_sizes(message, [kept * value_bytes, -(-num_elements // 8)])
        return values.view(dtype), _places(bits, num_elements)
    sizes = [kept * value_bytes, kept * codec.index_bytes]
    if codec.index_bytes > value_bytes:
        indices, values = torch.split_with_sizes(message, sizes[::-1])
    else:
        values, indices = torch.split_with_sizes(message, sizes)
    index_type = torch.int32 if codec.index_bytes == 4 else torch.int64
    return values.view(dtype), indices.view(index_type).long()


def _bits(flags: Tensor) -> Tensor:
    """Pack eight flags into each byte; bit n holds the n-th eighth, so whole arrays are packed."""
    bits = flags.to(torch.uint8)
    short = -bits.numel() % 8
    if short:
        bits = torch.cat([bits, bits.new_zeros(short)])
    planes = bits.view(8, -1)
    packed = planes[0].clone()
    for number in range(1, 8):
        packed |= planes[number] << number
    return packed


def _places(bits: Tensor, num_elements: int) -> Tensor:
    """Positions of the set flags in a result of ``_bits``."""
    flags = torch.cat([(bits >> number) & 1 for number in range(8)])
    return flags[:num_elements].nonzero().view(-1)


def _as_bytes(flat: Tensor) -> Tensor:
    return flat.contiguous().view(torch.uint8)
