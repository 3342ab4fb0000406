"""Which slots of a cache are free, in use or reserved.

Lives here: the bookkeeping of slot numbers and its errors. Not here: what is in a slot (cache.py).
"""

from __future__ import annotations

from collections.abc import Iterable


class OutOfSlotsError(RuntimeError):
    """More slots were asked for than are free; nothing was allocated.

    Attributes:
        wanted: slots asked for.
        free: slots free.
    """

    def __init__(self, wanted: int, free: int, capacity: int) -> None:
        """Say what was wanted and what there is."""
        self.wanted, self.free, self.capacity = wanted, free, capacity
        super().__init__(
            f"StateCache: {wanted} slot{'s' * (wanted != 1)} wanted, {free} of {capacity} free; "
            "release sequences or make the cache larger"
        )

    def __reduce__(self) -> tuple[type[OutOfSlotsError], tuple[int, int, int]]:
        """Pickle by the numbers, so that the error crosses process borders whole."""
        return type(self), (self.wanted, self.free, self.capacity)


class Slots:
    """The numbers ``reserved`` to ``count - 1``, each free or in use.

    Attributes:
        free: free slots, the next one to be handed out at the end.
        live: slots in use.
    """

    def __init__(self, count: int, reserved: int) -> None:
        self.reserved = reserved
        # The lowest number goes first, so that runs are reproducible.
        self.free = list(range(count - 1, reserved - 1, -1))
        self.live: set[int] = set()
        self._generations = [0] * count

    def take(self, count: int) -> list[int]:
        """Hand out slots.

        Raises:
            OutOfSlotsError: fewer than ``count`` are free.
            ValueError: ``count`` is negative.
        """
        if count < 0:
            raise ValueError(f"StateCache: the number of slots must be >= 0, got {count}")
        if count > len(self.free):
            raise OutOfSlotsError(count, len(self.free), len(self._generations) - self.reserved)
        taken = [self.free.pop() for _ in range(count)]
        self.live.update(taken)
        for slot in taken:
            self._generations[slot] += 1
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Take back slots that :meth:`checked` has seen."""
        for slot in slots:
            self.live.remove(slot)
            self.free.append(slot)

    def checked(self, action: str, slots: Iterable[int]) -> list[int]:
        """Return slots as a list, each of them in use and named once.

        Raises:
            ValueError: one of them is not.
        """
        chosen = list(slots)
        for slot in chosen:
            if slot not in self.live:
                raise ValueError(f"StateCache.{action}: slot {slot} is {self._fate(slot)}")
        if len(set(chosen)) != len(chosen):
            twice = next(slot for slot in chosen if chosen.count(slot) > 1)
            raise ValueError(f"StateCache.{action}: slot {twice} is named twice")
        return chosen

    def generations_of(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Return how many times each slot has been handed out so far."""
        return tuple(self._generations[slot] for slot in slots)

    def unchanged(self, action: str, slots: Iterable[int], generations: Iterable[int]) -> None:
        """Check that slots belong to whom they belonged to at those generations.

        Raises:
            ValueError: one of them has been handed out again since.
        """
        for slot, then in zip(slots, generations, strict=True):
            if self._generations[slot] != then:
                raise ValueError(
                    f"StateCache.{action}: slot {slot} was released after the snapshot and belongs "
                    "to another sequence now"
                )

    def _fate(self, slot: object) -> str:
        """Say why a slot is not in use."""
        if not isinstance(slot, int) or not 0 <= slot < len(self._generations):
            return f"none of this cache, whose slots are {self.reserved} to {self._last}"
        if slot < self.reserved:
            return "reserved for padding and belongs to no sequence"
        return "not in use: released already" if self._generations[slot] else "not in use"

    @property
    def _last(self) -> int:
        return len(self._generations) - 1
