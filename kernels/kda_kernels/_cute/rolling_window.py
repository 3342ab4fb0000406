"""The window of one sequence's convolution, which its tokens move: read, and written, in columns.

Lives here: which columns a sequence's first token has before it, and which its tokens fill. A lane
has four channels. Not here: how channels and columns lie in memory (convolution.py), what is made
of them (sequence.py).
"""

import itertools

import cutlass
from cutlass import Constexpr, Int32, Int64, const_expr, cute

from kda_kernels._cute import convolution
from kda_kernels._cute.convolution import HISTORY
from kda_kernels._cute.token import Inputs, form_of


@cute.jit
def read_history(
    i: Constexpr,
    slot_window: cute.Pointer,
    at: Int32,
    begin: Int32,
    start: Int32,
    accepted: Int32,
    columns: cute.Tensor,
    v: Constexpr,
) -> None:
    """Read the three columns before token ``start`` to the front of ``columns``.

    They are those from ``accepted`` on of the window, and later on rows of x.
    """
    form, channels = const_expr(form_of(v)), Int32(i.x.shape[1])
    if start == 0:
        if const_expr(v.by_channel):
            whole = convolution.empty_window(form, i.x.element_type)
            convolution.read_window(slot_window, at, channels, form, whole)
            for j in cutlass.range_constexpr(HISTORY):
                for c in cutlass.range_constexpr(convolution.CHANNELS):
                    chosen = whole[c, j]
                    for a in cutlass.range_constexpr(1, v.columns - HISTORY + 1):
                        chosen = cutlass.select_(accepted == a, whole[c, j + a], chosen)
                    columns[c, j] = chosen
        else:
            convolution.read_columns(slot_window, at, channels, accepted, columns)
    else:
        for j in cutlass.range_constexpr(HISTORY):
            read_row(i, begin + start - HISTORY + j, at, columns[None, j], v)


def read_row(i: Inputs, row: Int32, at: Int32, values: cute.Tensor, v: Constexpr) -> None:
    """Read a lane's channels of a row of x."""
    offset = Int64(row) * i.x.stride[0] + at
    convolution.read_token(i.x.iterator, offset, form_of(v), values)


@cute.jit
def write(
    i: Constexpr,
    slot_window: cute.Pointer,
    at: Int32,
    span: tuple[Int32, Int32, Int32],
    columns: cute.Tensor,
    v: Constexpr,
) -> None:
    """Write tokens to the columns from ``start + 2`` on, and the newest history before token 0.

    A window of layout DS is written whole with token 0: a column is a number at a time there.

    Args:
        i: the call.
        slot_window: where the window starts.
        at: the lane's first channel.
        span: the sequence's first row and length, the first token ``start``.
        columns: the history and the tokens behind it; those at ``length`` and beyond are none.
        v: the variant.
    """
    begin, length, start = span
    form, channels = const_expr(form_of(v)), Int32(i.x.shape[1])
    newest, count = const_expr(HISTORY - 1), const_expr(convolution.CHANNELS)
    step = const_expr(cute.size(columns, mode=[1]) - HISTORY)
    if const_expr(v.by_channel):
        if start == 0:
            # Read once more: while tokens are read, registers for all of it are too few.
            whole = convolution.empty_window(form, i.x.element_type)
            convolution.read_window(slot_window, at, channels, form, whole)
            for c, j in const_expr(list(itertools.product(range(count), range(newest)))):
                whole[c, j] = columns[c, j + 1]
            for t in cutlass.range_constexpr(min(v.room, v.columns - newest)):
                token = columns[None, min(t, step - 1) + HISTORY]
                if const_expr(t >= step):
                    token = cute.make_rmem_tensor((count,), i.x.element_type)
                    read_row(i, begin + cutlass.min(Int32(t), length - 1), at, token, v)
                for c in cutlass.range_constexpr(count):
                    old = whole[c, t + newest]
                    whole[c, t + newest] = cutlass.select_(t < length, token[c], old)
            convolution.write_whole(slot_window, at, form, whole)
    else:
        if start == 0:
            for j in cutlass.range_constexpr(newest):
                convolution.write_column(slot_window, at, channels, j, columns[None, j + 1])
        for t in cutlass.range_constexpr(step):
            if start + t < length:
                token = columns[None, t + HISTORY]
                convolution.write_column(slot_window, at, channels, start + t + newest, token)
