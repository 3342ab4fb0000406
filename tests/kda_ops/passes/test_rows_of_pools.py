"""Rows of a pool by look-ups, gathers and scatters, and pools whose rows are vectors."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F


def inside(pool, slots):
    """Slots without negative ones, which these operations do not take."""
    return slots % pool.shape[0]


def spread(pool, slots):
    return inside(pool, slots).view(-1, *[1] * (pool.dim() - 1)).expand(-1, *pool.shape[1:])


def flat(pool):
    return pool.view(pool.shape[0], -1)


def read_lookup(pool, slots):
    return F.embedding(inside(pool, slots), pool.flatten(1)).view(-1, *pool.shape[1:])


def read_gather(pool, slots):
    return pool.gather(0, spread(pool, slots))


def read_flat_gather(pool, slots):
    index = inside(pool, slots)[:, None].expand(-1, pool[0].numel())
    return torch.gather(flat(pool), 0, index).unflatten(1, pool.shape[1:])


def read_repeated(pool, slots):
    index = inside(pool, slots).view(-1, 1, 1, 1).repeat(1, *pool.shape[1:])
    return pool.gather(0, index)


def read_flat(pool, slots):
    return flat(pool)[inside(pool, slots)].view(-1, *pool.shape[1:])


def read_flat_select(pool, slots):
    return flat(pool).index_select(0, inside(pool, slots)).view(-1, *pool.shape[1:])


def read_lines(pool, slots):
    """Heads and keys in one dimension."""
    return pool.flatten(1, 2)[inside(pool, slots)].view(-1, *pool.shape[1:])


def read_cast(pool, slots):
    return flat(pool.float())[inside(pool, slots)].view(-1, *pool.shape[1:])


def read_plain(pool, slots):
    return pool[inside(pool, slots)]


def write_scatter(pool, slots, state):
    pool.scatter_(0, spread(pool, slots), state)


def write_flat_scatter(pool, slots, state):
    index = inside(pool, slots).unsqueeze(1).expand(-1, pool[0].numel())
    flat(pool).scatter_(0, index, state.flatten(1))


def write_flat(pool, slots, state):
    flat(pool)[inside(pool, slots)] = state.flatten(1)


def write_flat_copy(pool, slots, state):
    flat(pool).index_copy_(0, inside(pool, slots), state.reshape(state.shape[0], -1))


def write_lines(pool, slots, state):
    pool.flatten(1, 2)[inside(pool, slots)] = state.flatten(1, 2)


def write_plain(pool, slots, state):
    pool[inside(pool, slots)] = state


ANY = (read_plain, read_flat, read_flat_select, read_lines, read_cast)
WHOLE = (read_lookup, read_gather, read_flat_gather, read_repeated)
INDEXED = (write_plain, write_flat, write_flat_copy, write_lines)
SCATTERED = (write_scatter, write_flat_scatter)
PAIRS = [
    *itertools.product((read_plain,), (*INDEXED[1:], *SCATTERED)),
    *itertools.product((*ANY[1:], *WHOLE), (write_plain,)),
    (read_flat, write_flat),
    (read_lookup, write_flat_scatter),
    (read_gather, write_scatter),
    (read_lines, write_flat_copy),
]
IDS = [f"{read.__name__}-{write.__name__}" for read, write in PAIRS]


@pytest.mark.parametrize(("read", "write"), PAIRS, ids=IDS)
def test_whole_rows_are_rewritten_and_negative_slots_go_as_the_code_has_them(step, read, write):
    captured = step.check_step(step.Spelling(read=read, write=write))
    assert captured.matches == 1
    plain = read in ANY and write in INDEXED
    assert captured.findings[0].arguments["first_slot"] == ("None" if plain else "0")
    assert not {"aten.scatter.src", "aten.gather.default"}.intersection(captured.targets)


@pytest.mark.parametrize(("rows", "dynamic"), [(1, False), (4, True)])
def test_batches_of_one_row_and_of_any_number(step, rows, dynamic):
    spelling = step.Spelling(read=read_lookup, write=write_flat_scatter, pool=torch.bfloat16)
    assert step.check_step(spelling, rows=rows, dynamic=dynamic).matches == 1


@pytest.mark.parametrize(
    ("read", "write"), [(read_lookup, write_flat_scatter), (read_flat, write_flat)]
)
def test_steps_that_follow_each_other_in_one_graph_are_rewritten_each(step, read, write):
    class Twice(step.StepLayer):
        def forward(self, *given):
            return super().forward(*given) + super().forward(*given)

    spelling = step.Spelling(read=read, write=write)
    layer, given = Twice(spelling), step.inputs(spelling)
    eager = copy.deepcopy(layer)
    with torch.no_grad():
        expected = eager(*given)
    captured = step.capture(layer, *given)
    assert captured.matches == 2
    step.compare(captured.output, expected, step.ROUNDING[torch.bfloat16])
    step.compare(layer.pool, eager.pool, step.ROUNDING[torch.float32])


def partly(pool, slots, state):
    """Half of the heads keep what they had."""
    half = spread(pool, slots)[:, : pool.shape[1] // 2]
    pool.scatter_(0, half, state)


def transposed(pool, slots, state):
    """Rows are named by the last dimension of the index instead of the first."""
    index = inside(pool, slots)[:1].expand(state.shape)
    pool.scatter_(0, index, state)


def repeated_by_row(pool, slots, state):
    """Rows take turns: the index of two rows is repeated for the batch."""
    index = inside(pool, slots)[:2].view(-1, 1, 1, 1).repeat(2, *pool.shape[1:])
    pool.scatter_(0, index, state)


def by_head(pool, slots, state):
    index = (inside(pool, slots)[:, None] + torch.arange(state.shape[1])) % pool.shape[0]
    pool.scatter_(0, index[..., None, None].expand(state.shape), state)


def in_heads(pool, slots, state):
    index = inside(pool, slots).view(-1, 1, 1, 1).expand(state.shape) % pool.shape[1]
    pool.scatter_(1, index[: pool.shape[0]], state)


def by_reduction(pool, slots, state):
    pool.scatter_reduce_(0, spread(pool, slots), state, "amax")


def by_sum(pool, slots, state):
    pool.scatter_add_(0, spread(pool, slots), state)


def fewer(pool, slots, state):
    pool.scatter_(0, spread(pool, slots[:-1]), state)


def mixed(pool, slots, state):
    """Keys and values change places on the way to the vector."""
    flat(pool)[inside(pool, slots)] = state.transpose(-1, -2).flatten(1)


def rotated(pool, slots, state):
    flat(pool)[inside(pool, slots)] = state.flatten(1).roll(1, 1)


NEAR_MISSES = [
    (partly, "INDEX_FORM", "only a part of each row"),
    (transposed, "INDEX_FORM", "not one slot for all elements of a row"),
    (repeated_by_row, "INDEX_FORM", "not one slot for all elements of a row"),
    (by_head, "INDEX_FORM", "not one slot for all elements of a row"),
    (in_heads, "INDEX_FORM", "along dimension 1"),
    (by_reduction, "ACCUMULATES", ""),
    (by_sum, "ACCUMULATES", ""),
    (fewer, "INDEX_MISMATCH", ""),
    (mixed, "NOT_DELTA_RULE", ""),
    (rotated, "NOT_UNDERSTOOD", ""),
]


@pytest.mark.parametrize(("write", "reason", "detail"), NEAR_MISSES)
def test_writes_of_anything_but_whole_rows_are_refused(step, write, reason, detail):
    spelling = step.Spelling(read=read_plain, write=write)
    captured = step.capture(step.StepLayer(spelling), *step.inputs(spelling))
    assert captured.reasons == [reason]
    assert detail in captured.findings[0].detail
    assert captured.after == captured.before
