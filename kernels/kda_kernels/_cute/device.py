"""Device functions that kernels share: sums over lanes, gates, vectors, the slot rule.

Lives here: what is traced into kernels. Loops over compile-time counts are unrolled while tracing.
Not here: kernels and schedules (<op>/cute.py, <op>/config.py).
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from kda_kernels._cute.call import VECTOR_BYTES

L2_EPS = 1e-6
LOG2_E = 1.4426950408889634


def wait_for_the_kernel_before(overlaps: bool) -> None:
    """Wait until all that the stream did before is done, where blocks may start earlier."""
    if overlaps:
        cute.arch.griddepcontrol_wait()


def let_the_next_kernel_start(overlaps: bool) -> None:
    """Allow blocks of the next kernel to start; those that overlap wait for this kernel's end."""
    if overlaps:
        cute.arch.griddepcontrol_launch_dependents()


def slot_and_liveness(
    state_indices: cute.Tensor | None, row: Int32, slots: Int64, first_slot: Int64, wraps: bool
) -> tuple[Int64, Any]:
    """Return the row's slot and whether it is one; any index value is safe.

    Args:
        state_indices: [B], or None: row i uses slot i.
        row: number of the row.
        slots: of the pool.
        first_slot: lowest index that is live.
        wraps: negative indices count from the end.
    """
    if state_indices is None:
        return Int64(row), Int64(row) < slots
    at = Int64(row) * state_indices.stride[0]
    return slot_at(state_indices, at, slots, first_slot, wraps)


def slot_at(
    state_indices: cute.Tensor, at: Int64, slots: Int64, first_slot: Int64, wraps: bool
) -> tuple[Int64, Any]:
    """Return the slot that the index ``at`` elements behind the first names, and whether it is one.

    The other arguments are those of ``slot_and_liveness``.
    """
    slot = slot_of(Int64(raw(state_indices.iterator, at)), slots, wraps)
    return slot, (slot >= first_slot) & (slot < slots)


@dsl_user_op
def assembly(
    text: str,
    constraints: str,
    result: Any,  # noqa: ANN401 - a type of the intermediate language, or None
    *operands: Any,  # noqa: ANN401 - numbers
    stays: bool = True,
    loc: object = None,
    ip: object = None,
) -> Any:  # noqa: ANN401 - a value of the intermediate language
    """Put an instruction of PTX where it is written.

    Args:
        text: the instruction.
        constraints: how its operands are passed.
        result: the type of its result.
        *operands: what it reads.
        stays: it is neither moved across others that stay nor dropped.
        loc: of the operation, for the compiler.
        ip: of the operation, for the compiler.
    """
    return llvm.inline_asm(
        result,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        text,
        constraints,
        has_side_effects=stays,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def launder(word: Int32) -> Int32:
    """Return a 32-bit word through a move that the compiler cannot look into."""
    return Int32(assembly("mov.b32 $0, $1;", "=r,r", T.i32(), Int32(word)))


def launder_address(address: Int64) -> Int64:
    """Return an address through a move that the compiler cannot look into.

    Without it the parts of many addresses that a loop does not change are kept in registers, two
    for each access, instead of one address with constants beside it.
    """
    return Int64(assembly("mov.b64 $0, $1;", "=l,l", T.i64(), Int64(address)))


_HALVES = (
    ("shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;"),
    ("prmt.b32 $0, $1, 0, 0x1044;", "prmt.b32 $0, $1, 0, 0x3244;"),
)
"""How the two bfloat16 of a word become float32, first and again, an instruction each."""


def unpacked(vector: cute.Tensor, *, again: bool = False) -> cute.Tensor:
    """Return a register vector of float32 or bfloat16 as float32.

    What is needed again later is unpacked ``again``, in other words, so that the compiler does not
    keep what it unpacked first: 151 registers against 108 for a bf16 tile of 16 rows.
    """
    if vector.element_type is Float32:
        return vector
    words = cute.recast_tensor(vector, Int32)
    result = cute.make_rmem_tensor(vector.layout, Float32)
    for i in range(cute.size(words)):
        for j, how in enumerate(_HALVES[again]):
            half = assembly(how, "=f,r", T.f32(), Int32(words[i]), stays=again)
            result[2 * i + j] = Float32(half)
    return result


def lane_sum(x: Float32, width: int) -> Float32:
    """Return the sum over aligned groups of ``width`` lanes, in every lane."""
    offset = width // 2
    while offset:
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
        offset //= 2
    return x


def halving_sum(values: cute.Tensor, count: int, lane: Int32, offset: int, steps: int) -> int:
    """Sum ``count`` values over lanes and hand every lane its share of the sums.

    Each step exchanges half of the values with the lane ``offset`` away, then halves ``offset``:
    ``count`` sums over 2**steps lanes cost ``count`` shuffles and not ``count * steps``. A lane
    whose bit ``offset`` is set keeps the upper half, so the bits from ``offset`` downwards number
    the share. The sums lie at the front of ``values``; returned is how many there are.
    """
    for _ in range(steps):
        count //= 2
        upper = (lane & offset) != 0
        for i in range(count):
            low, high = values[i], values[i + count]
            sent = cutlass.select_(upper, low, high)
            kept = cutlass.select_(upper, high, low)
            values[i] = kept + cute.arch.shuffle_sync_bfly(sent, offset=offset)
        offset //= 2
    return count


def sigmoid(x: Float32) -> Float32:
    """Return 1 / (1 + exp(-x)), within 2 units in the last place; 0 and 1 at the infinities."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp(-x))


def power_of_two(x: Float32) -> Float32:
    """Return 2**x by the hardware's instruction: within 2 units in the last place of 2**x."""
    return cute.math.exp2(x, fastmath=True)


def decay(a: Float32, rate: Float32, lower_bound: Float32, softplus: bool) -> Float32:
    """Return exp(g) of one channel.

    A rounded exponent x puts a relative error of x*2**-24 on its power. Where the power shrinks as
    x grows, that is at most 0.4*2**-24 of one, so g and the sigmoid's exponent may be rounded; the
    softplus gate's exponential may not, because a large rate multiplies it.

    Args:
        a: raw gate plus bias.
        rate: exp(A_log).
        lower_bound: of the lower-bound gate; ignored by the softplus gate.
        softplus: which gate. Its logarithm takes exp(-abs(a)), so nothing overflows, and above 20
            it adds less than half a unit to ``a``, which is the contract's threshold.
    """
    if softplus:
        magnitude = cute.arch.fmax(a, -a)
        bounded = cute.arch.fmax(a, Float32(0.0)) + cute.math.log1p(cute.math.exp(-magnitude))
        return power_of_two(bounded * (rate * -LOG2_E))
    share = cute.arch.rcp_approx(1.0 + power_of_two(a * (rate * -LOG2_E)))
    return power_of_two(share * (lower_bound * LOG2_E))


def pointer(base: cute.Pointer, offset: Int64, alignment: int) -> cute.Pointer:
    """Return ``base + offset`` elements as a pointer to global memory of a known alignment."""
    return cute.make_ptr(
        base.dtype, (base + offset).toint(), cute.AddressSpace.gmem, assumed_align=alignment
    )


def opaque_shared(pointer: cute.Pointer) -> cute.Pointer:
    """Return a pointer to shared memory, at a multiple of 16 bytes, as ``opaque`` does."""
    address = launder(pointer.toint())
    return cute.make_ptr(pointer.dtype, address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)


def opaque(pointer: cute.Pointer, alignment: int) -> cute.Pointer:
    """Return a pointer to global memory whose parts the compiler cannot tell apart."""
    address = launder_address(pointer.toint())
    return cute.make_ptr(pointer.dtype, address, cute.AddressSpace.gmem, assumed_align=alignment)


def register(name: str) -> Int32:
    """Read a special register again, so that nothing has to keep its value until here."""
    return Int32(assembly(f"mov.u32 $0, %{name};", "=r", T.i32()))


def vector(base: cute.Pointer, offset: Int64, count: int, alignment: int) -> cute.Tensor:
    """See ``count`` neighbouring elements, the first at a known alignment, to copy in vectors."""
    return cute.make_tensor(pointer(base, offset, alignment), cute.make_layout(count))


def read(base: cute.Pointer, offset: Int64, count: int, aligned: bool) -> cute.Tensor:
    """Return ``count`` neighbouring elements as float32 registers.

    ``aligned`` promises that they start at a multiple of their own size or of 16 bytes, whichever
    is less; without it they are read one by one.
    """
    width = base.dtype.width
    step = min(VECTOR_BYTES, count * width // 8) if aligned else width // 8
    raw = cute.make_rmem_tensor((count,), base.dtype)
    cute.autovec_copy(vector(base, offset, count, step), raw)
    result = cute.make_rmem_tensor((count,), Float32)
    for i in range(count):
        result[i] = Float32(raw[i])
    return result


def prefetch(base: cute.Pointer, offset: Int64) -> None:
    """Bring the line of memory around an element into the second-level cache."""
    assembly("prefetch.global.L2 [$0];", "l", None, Int64((base + offset).toint()))


def converted(values: cute.Tensor, dtype: Any) -> cute.Tensor:  # noqa: ANN401 - a CUTLASS type
    """Return a register tensor in a type, as it is where that is its own."""
    if values.element_type is dtype:
        return values
    result = cute.make_rmem_tensor(values.layout, dtype)
    for i in range(cute.size(values)):
        result[i] = dtype(values[i])
    return result


def raw(base: cute.Pointer, offset: Int64) -> Any:  # noqa: ANN401 - the pointer's type
    """Return one element in its own type."""
    return cute.make_tensor(base + offset, cute.make_layout(1))[0]


def element(base: cute.Pointer, offset: Int64) -> Float32:
    """Return one element as float32."""
    return Float32(raw(base, offset))


def sum_of_squares(values: cute.Tensor) -> Float32:
    """Return the sum of a lane's squares, each product fused into the sum."""
    total = Float32(0.0)
    for i in range(cute.size(values)):
        total = cute.math.fma(values[i], values[i], total)
    return total


def slot_of(index: Int64, slots: Int64, wraps: bool) -> Int64:
    """Return the slot that an index names: under ``wraps`` negative ones count from the end.

    The result may lie outside the pool; that is for the caller to test.
    """
    if not wraps:
        return index
    return cutlass.select_(index < Int64(0), index + slots, index)
