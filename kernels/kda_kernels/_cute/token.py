"""A token of one head in shared memory, and what kernels of the fused operators do with it.

Lives here: its rows, how each is made by the lanes of one warp, and the gated norm behind the
recurrence. Not here: which rows and slots a kernel touches, and when (<op>/cute.py); the
convolution itself (convolution.py).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from kda_kernels._cute import cluster, convolution, device
from kda_kernels._cute.call import VECTOR_BYTES
from kda_kernels.contract.spec import HEAD_DIM as D

DECAY, K, Q, V, GAIN, MADE = 0, 1, 2, 3, 4, 5
"""Rows of a token: what the recurrence takes, the gain behind the norm, what the recurrence made.
key_rows takes the first three as one."""
ROWS = 6
SIZE = ROWS * D + 4
"""Of a token's memory, in numbers: its rows, single ones, and a filler."""
DECAYS, GAINS = 3, 4
"""Who makes what of a token, behind the warps of q, k and v, 0 to 2."""


class Tokens:
    """``count`` tokens in shared memory, each with all that is its own in one piece."""

    def __init__(self, smem: SmemAllocator, count: int) -> None:
        """Reserve the memory."""
        layout = cute.make_layout((SIZE, count), stride=(1, SIZE))
        self.numbers = smem.allocate_tensor(Float32, layout, byte_alignment=16)


class Token:
    """One token: ``rows`` of 128 by the names above, and single numbers.

    They are ``beta``, the ``slot`` of its checkpoint, -1 where it has none, and ``place``, the row
    of the call.
    """

    def __init__(self, base: cute.Pointer) -> None:
        """See the memory at ``base`` as a token's."""
        self.base = base
        self.rows = [cute.make_tensor(base + r * D, cute.make_layout(D)) for r in range(ROWS)]
        beta, slot, place = range(ROWS * D, ROWS * D + 3)
        one = cute.make_layout(1)
        self.beta = cute.make_tensor(base + beta, one)
        self.slot = cute.make_tensor(cute.recast_ptr(base + slot, dtype=Int32), one)
        self.place = cute.make_tensor(cute.recast_ptr(base + place, dtype=Int32), one)

    def row_of_part(self, part: Int32) -> cute.Tensor:
        """Return the row of q, k or v, 0 to 2 as parts of x follow each other."""
        number = cutlass.select_(part < 2, Q - part, Int32(V))
        return cute.make_tensor(self.base + number * D, cute.make_layout(D))


def token_of(tokens: Tokens, number: int | Int32) -> Token:
    """Return one of the tokens."""
    base = tokens.numbers[None, number].iterator
    if not isinstance(number, int):
        base = device.opaque_shared(base)
    return Token(base)


@dataclass(frozen=True)
class Inputs:
    """A call's tensors and scalars while a kernel is traced, by their names in the contract."""

    x: Any
    weight: Any
    conv_state: Any
    raw_gate: Any
    raw_beta: Any
    A_log: Any
    dt_bias: Any
    state: Any
    output_gate: Any
    norm_weight: Any
    conv_bias: Any
    output: Any
    scale: Any
    lower_bound: Any
    norm_eps: Any

    def window(self, slot: Int64) -> cute.Pointer:
        """Return where a slot's window starts."""
        at = slot * self.conv_state.stride[0]
        return device.pointer(self.conv_state.iterator, at, convolution.SLOT_BYTES)

    def state_of(self, slot: Int64, head: Int32) -> cute.Pointer:
        """Return where one head's state starts."""
        at = slot * self.state.stride[0] + Int64(head) * (D * D)
        return device.pointer(self.state.iterator, at, VECTOR_BYTES)

    def target(self, row: Int32, head: Int32) -> cute.Tensor:
        """Return one head of an output row, [128]."""
        at = (Int64(row) * self.state.shape[1] + head) * D
        return cute.make_tensor(self.output.iterator + at, cute.make_layout(D))


def form_of(v: Constexpr) -> convolution.Form:
    """Return how window and taps lie."""
    return convolution.Form(v.columns, v.by_channel, v.taps_last, v.aligned)


def put(row: cute.Tensor, values: cute.Tensor, lane: Int32) -> None:
    """Write a lane's neighbouring values of a row."""
    count = cute.size(values)
    for c in range(count):
        row[lane * count + c] = values[c]


@cute.jit
def put_everywhere(
    token: Constexpr,
    part: Int32,
    values: cute.Tensor,
    lane: Int32,
    blocks: Constexpr,
    barrier: Constexpr,
) -> None:
    """Write a lane's four values of q, k or v, to every block of a cluster if it is one.

    Args:
        token: in shared memory.
        part: 0 to 2.
        values: the lane's.
        lane: within the warp.
        blocks: of the cluster.
        barrier: that counts what arrives, where there is more than one block.
    """
    row = token.row_of_part(part)
    if const_expr(blocks == 1):
        put(row, values, lane)
    else:
        place = row.iterator + lane * convolution.CHANNELS
        four = tuple(values[c] for c in range(convolution.CHANNELS))
        for rank in cutlass.range_constexpr(blocks):
            cluster.send(place, barrier, Int32(rank), four)


def make_part(part: Int32, values: cute.Tensor, scale: Float32) -> None:
    """Turn the values of a warp's lanes into q, k or v: parts 0 to 2 of x.

    k becomes a unit vector, q one times ``scale``; v stays as it is.
    """
    squares = device.lane_sum(device.sum_of_squares(values), 32)
    unit = cute.math.rsqrt(squares + device.L2_EPS)
    of_k = cutlass.select_(part == 1, unit, Float32(1.0))
    factor = cutlass.select_(part == 0, unit * scale, of_k)
    for c in range(cute.size(values)):
        values[c] = values[c] * factor


def channels_of(
    i: Inputs,
    name: str,
    rows: tuple[Int32, ...],
    head: Int32,
    lane: Int32,
    v: Constexpr,
    *,
    aligned: bool,
) -> list[cute.Tensor]:
    """Return a lane's channels of rows of a gate, all asked for before one is waited for."""
    source, stride = getattr(i, name), getattr(i, name).stride[v.row_axis(name)]
    offsets = [Int64(row) * stride + (head * D + lane * convolution.CHANNELS) for row in rows]
    return [device.read(source.iterator, at, convolution.CHANNELS, aligned) for at in offsets]


def put_decays(
    tokens: tuple[Token, ...],
    i: Inputs,
    rows: tuple[Int32, ...],
    head: Int32,
    lane: Int32,
    v: Constexpr,
) -> None:
    """Make the decays of tokens, each of the row beside it."""
    count = convolution.CHANNELS
    gates = channels_of(i, "raw_gate", rows, head, lane, v, aligned=v.aligned)
    channel = Int64(head * D + lane * count)
    bias = device.read(i.dt_bias.iterator, channel, count, v.aligned)
    rate = cute.math.exp(device.element(i.A_log.iterator, Int64(head)))
    for token, a in zip(tokens, gates, strict=True):
        for c in range(count):
            a[c] = device.decay(a[c] + bias[c], rate, i.lower_bound, v.softplus)
        put(token.rows[DECAY], a, lane)


def put_gains(
    tokens: tuple[Token, ...],
    i: Inputs,
    rows: tuple[Int32, ...],
    head: Int32,
    lane: Int32,
    v: Constexpr,
) -> None:
    """Make the gains of tokens behind the norm, each of the row beside it."""
    count = convolution.CHANNELS
    gates = channels_of(i, "output_gate", rows, head, lane, v, aligned=False)
    weights = device.read(i.norm_weight.iterator, Int64(lane * count), count, False)
    for token, gate in zip(tokens, gates, strict=True):
        for c in range(count):
            gate[c] = weights[c] * device.sigmoid(gate[c])
        put(token.rows[GAIN], gate, lane)


@cute.jit
def put_numbers(token: Constexpr, i: Constexpr, row: Int32, head: Int32, v: Constexpr) -> None:
    """Make a token's beta, and note which row it has."""
    axis, beta, place = const_expr(v.beta_axis), token.beta, token.place
    place[0] = row
    at = Int64(row) * i.raw_beta.stride[axis] + Int64(head) * i.raw_beta.stride[axis + 1]
    beta[0] = device.sigmoid(device.element(i.raw_beta.iterator, at))


def dot_of_units(token: Token, lane: Int32) -> Float32:
    """Return k.q of the unit vectors, in every lane."""
    total = Float32(0.0)
    for j in range(D // 32):
        at = lane + 32 * j
        total = cute.math.fma(token.rows[K][at], token.rows[Q][at], total)
    return device.lane_sum(total, 32)


def finish(token: Token, i: Inputs, head: Int32, lane: Int32) -> None:
    """Write the gated RMSNorm of what the recurrence made, with the lanes of one warp."""
    target = i.target(token.place[0], head)
    count = D // 32
    by_lane = cute.make_layout((count, 32))
    o = cute.make_rmem_tensor((count,), Float32)
    gain = cute.make_rmem_tensor((count,), Float32)
    cute.autovec_copy(cute.make_tensor(token.rows[MADE].iterator, by_lane)[None, lane], o)
    cute.autovec_copy(cute.make_tensor(token.rows[GAIN].iterator, by_lane)[None, lane], gain)
    total = device.lane_sum(device.sum_of_squares(o), 32)
    unit = cute.math.rsqrt(total * (1.0 / D) + i.norm_eps)
    y = cute.make_rmem_tensor((count,), target.element_type)
    for c in range(count):
        y[c] = target.element_type(o[c] * unit * gain[c])
    cute.autovec_copy(y, cute.make_tensor(target.iterator + lane * count, cute.make_layout(count)))


@cute.jit
def write_zeros(target: cute.Tensor, thread: Int32) -> None:
    """Write a null row's output."""
    if thread < D:
        target[thread] = target.element_type(0.0)
