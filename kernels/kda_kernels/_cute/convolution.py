"""The short convolution of one token: four channels a lane, so that a warp makes one head's part.

Lives here: reading and writing a slot's window in either layout, the taps, the sum with its SiLU.
Not here: who does it, and where the result goes (<op>/cute.py).

A window is SD (channels side by side, columns apart) or DS (a channel's columns side by side); in
DS the lane's four channels are ``4 * columns`` neighbouring elements, which move as vectors and are
transposed in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Int64, cute

from kda_kernels._cute import device
from kda_kernels._cute.call import VECTOR_BYTES

CHANNELS = 4
"""Channels of a lane."""
HISTORY = 3
"""Columns that a token's sum reads beside the token itself."""
SLOT_BYTES = 8
"""At whose multiples every slot of a window starts, and no more than that."""


@dataclass(frozen=True)
class Form:
    """How window and taps lie in memory.

    Attributes:
        columns: columns of the window, 3 or more.
        by_channel: DS; otherwise SD.
        taps_last: weight is channel-major; otherwise tap-major.
        aligned: lanes may read vectors of the token and the weight.
    """

    columns: int
    by_channel: bool
    taps_last: bool
    aligned: bool


def empty_window(form: Form, dtype: Any) -> cute.Tensor:  # noqa: ANN401 - a CUTLASS type
    """Return registers for a lane's window, (channel, column)."""
    layout = cute.make_layout((CHANNELS, form.columns), stride=(form.columns, 1))
    return cute.make_rmem_tensor(layout, dtype)


def read_window(
    base: cute.Pointer, channel: Int32, channels: Int32, form: Form, window: cute.Tensor
) -> None:
    """Read a lane's window into ``window`` (channel, column)."""
    width = base.dtype.width // 8
    if form.by_channel:
        count = CHANNELS * form.columns
        flat = cute.make_rmem_tensor((count,), base.dtype)
        place = device.vector(base, Int64(channel) * form.columns, count, SLOT_BYTES)
        cute.autovec_copy(place, flat)
        for c in range(CHANNELS):
            for j in range(form.columns):
                window[c, j] = flat[c * form.columns + j]
        return
    step = min(SLOT_BYTES, CHANNELS * width)
    for j in range(form.columns):
        at = Int64(j) * channels + channel
        cute.autovec_copy(device.vector(base, at, CHANNELS, step), window[None, j])


def write_window(
    base: cute.Pointer,
    channel: Int32,
    channels: Int32,
    form: Form,
    window: cute.Tensor,
    token: cute.Tensor,
) -> None:
    """Write a lane's window moved by one column, the token last."""
    last = form.columns - 1
    if form.by_channel:
        moved = cute.make_rmem_tensor(window.layout, base.dtype)
        for c in range(CHANNELS):
            for j in range(form.columns):
                moved[c, j] = window[c, j + 1] if j < last else token[c]
        write_whole(base, channel, form, moved)
        return
    for j in range(form.columns):
        source = window[None, j + 1] if j < last else token
        write_column(base, channel, channels, j, source)


def write_whole(base: cute.Pointer, channel: Int32, form: Form, window: cute.Tensor) -> None:
    """Write all columns of a lane's window in layout DS."""
    count = CHANNELS * form.columns
    flat = cute.make_rmem_tensor((count,), base.dtype)
    for c in range(CHANNELS):
        for j in range(form.columns):
            flat[c * form.columns + j] = window[c, j]
    place = device.vector(base, Int64(channel) * form.columns, count, SLOT_BYTES)
    cute.autovec_copy(flat, place)


def write_column(
    base: cute.Pointer,
    channel: Int32,
    channels: Int32,
    column: int | Int32,
    values: cute.Tensor,
) -> None:
    """Write one column of a lane's window in layout SD."""
    step = min(SLOT_BYTES, CHANNELS * base.dtype.width // 8)
    at = Int64(column) * channels + channel
    cute.autovec_copy(values, device.vector(base, at, CHANNELS, step))


def read_columns(
    base: cute.Pointer,
    channel: Int32,
    channels: Int32,
    first: Int32,
    columns: cute.Tensor,
) -> None:
    """Read the three columns from ``first`` on of a lane's window in layout SD.

    They go to the front of ``columns`` (channel, column).
    """
    step = min(SLOT_BYTES, CHANNELS * base.dtype.width // 8)
    for j in range(HISTORY):
        at = Int64(first + j) * channels + channel
        cute.autovec_copy(device.vector(base, at, CHANNELS, step), columns[None, j])


def read_token(base: cute.Pointer, offset: Int64, form: Form, token: cute.Tensor) -> None:
    """Read a lane's four channels of the row, in their own type."""
    width = base.dtype.width // 8
    step = CHANNELS * width if form.aligned else width
    cute.autovec_copy(device.vector(base, offset, CHANNELS, step), token)


def read_taps(
    weight: cute.Pointer,
    part: int,
    channel: Int32,
    per_part: Int32,
    form: Form,
) -> cute.Tensor:
    """Return a lane's taps of [3, 4, H*D] weights as (tap, channel), in their own type.

    Args:
        weight: its last two axes in either order.
        part: 0 to 2, for q, k and v.
        channel: the lane's first channel within the part.
        per_part: channels of a part.
        form: how the weight lies.
    """
    taps = cute.make_rmem_tensor(
        cute.make_layout((4, CHANNELS), stride=(CHANNELS, 1)), weight.dtype
    )
    width = weight.dtype.width // 8
    step = min(VECTOR_BYTES, CHANNELS * width) if form.aligned else width
    for n in range(4):
        if form.taps_last:
            # Four taps of one channel lie side by side.
            at = (Int64(part) * per_part + channel + n) * 4
            row = cute.make_rmem_tensor((4,), weight.dtype)
            cute.autovec_copy(device.vector(weight, at, 4, step), row)
            for tap in range(4):
                taps[tap, n] = row[tap]
        else:
            at = Int64(part * 4 + n) * per_part + channel
            cute.autovec_copy(device.vector(weight, at, CHANNELS, step), taps[n, None])
    return taps


def silu_of_sum(
    taps: cute.Tensor, bias: cute.Tensor | None, history: cute.Tensor, token: cute.Tensor
) -> cute.Tensor:
    """Return silu of the convolution's sum, rounded to the token's type, as float32.

    Args:
        taps: (tap, channel); tap 3 multiplies the token.
        bias: (channel), or None.
        history: (channel, column) of the three columns before the token.
        token: the lane's channels of the row.
    """
    mixed = cute.make_rmem_tensor((CHANNELS,), Float32)
    for c in range(CHANNELS):
        total = Float32(0.0) if bias is None else bias[c]
        for tap in range(HISTORY):
            # Fused by name: which sums the compiler fuses may change with how inputs are read.
            total = cute.math.fma(Float32(taps[tap, c]), Float32(history[c, tap]), total)
        total = cute.math.fma(Float32(taps[HISTORY, c]), Float32(token[c]), total)
        mixed[c] = Float32(token.element_type(total * device.sigmoid(total)))
    return mixed
