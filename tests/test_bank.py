"""The slots of one layer: after every operation each slot holds exactly the expert it claims, or nobody's."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import InterruptAt
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.errors import CheckpointReadError
from mlxmoe.experts.bank import ExpertBank
from mlxmoe.experts.checkpoint import ExpertTensor
from mlxmoe.experts.reader import ExpertReader
from mlxmoe.experts.safetensors import read_header
from mlxmoe.experts.slots import Home

EXPERTS = 8


class Layer:
    """Expert tensors on disk as a checkpoint holds them, and banks over them."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.arrays = {
            "weight": mx.array(rng.integers(0, 2**32, (EXPERTS, 6, 4), dtype=np.uint32)),
            "scales": mx.array(rng.normal(size=(EXPERTS, 6)), dtype=mx.bfloat16),
        }
        path = folder / "model.safetensors"
        mx.save_safetensors(str(path), self.arrays)
        state, infos = read_header(path)
        self.files = {path: state}
        self.tensors = {
            name: ExpertTensor.stacked(path, info.offset, info.nbytes, EXPERTS) for name, info in infos.items()
        }
        self.fail_reads = 0

    def bank(self, slots: int, reader: ExpertReader | None = None) -> ExpertBank:
        arrays = dict(self.arrays)
        homes = {name: Home(arrays, name) for name in arrays}
        return ExpertBank(self.tensors, homes, slots, reader or self.reader())

    def reader(self) -> ExpertReader:
        return ExpertReader(self.files, preadv=self._preadv)

    def _preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.fail_reads:
            self.fail_reads -= 1
            if not self.fail_reads:
                os.preadv(descriptor, [buffers[0][:3]], offset)  # some bytes arrive before it breaks
                raise OSError(errno.EIO, "broken")
        return os.preadv(descriptor, buffers, offset)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    return Layer(tmp_path_factory.mktemp("layer"))


def full_bank(layer: Layer) -> ExpertBank:
    """A bank over arrays that hold every expert, as a resident layer has them."""
    arrays = dict(layer.arrays)
    return ExpertBank(layer.tensors, {name: Home(arrays, name) for name in arrays}, None, layer.reader())


def use(bank: ExpertBank, sequence: list[int]) -> None:
    """One call whose tokens want one expert each, each wave computed as soon as it is there."""
    waves = bank.want(sequence, top_k=1)
    fetched = 0
    for number, wave in enumerate(waves):
        while fetched < min(number + 2, len(waves)) and bank.fetch(waves[fetched]):
            fetched += 1
        assert fetched > number, "there is always room for the next wave once all before it have computed"
        bank.arrive(wave)
        assert all(0 <= slot < bank.slots for slot in bank.slots_of(wave))
        check(bank)
        bank.computed(wave)
    bank.used()


def check(bank: ExpertBank, layer: Layer | None = None) -> None:
    resident = bank.resident
    assert len(resident) <= bank.slots
    assert len(set(resident.values())) == len(resident), "no two experts in one slot"
    for name, array in bank.arrays.items():
        for expert, slot in resident.items():
            stored = layer.arrays[name] if layer else ORIGINALS[name]
            assert mx.array_equal(array[slot], stored[expert]), f"slot {slot} claims expert {expert}"


ORIGINALS: dict[str, mx.array] = {}


@pytest.fixture(autouse=True)
def _originals(layer: Layer) -> None:
    ORIGINALS.update(layer.arrays)
    layer.fail_reads = 0


@given(slots=st.integers(1, EXPERTS), sequences=st.lists(st.lists(st.integers(0, 7), min_size=1), max_size=8))
def test_slots_hold_what_they_claim(layer: Layer, slots: int, sequences: list[list[int]]) -> None:
    bank, wanted = layer.bank(slots), set[int]()
    for sequence in sequences:
        use(bank, sequence)
        wanted.update(sequence)
        assert len(bank.resident) == min(slots, len(wanted)), "no slot is left empty"


@given(
    slots=st.integers(1, EXPERTS),
    sequences=st.lists(st.lists(st.integers(0, 7), min_size=1), min_size=1, max_size=8),
    fails=st.integers(1, 12),
)
def test_a_failed_read_leaves_no_lie_behind(layer: Layer, slots: int, sequences: list[list[int]], fails: int) -> None:
    bank = layer.bank(slots)
    layer.fail_reads = fails
    for sequence in sequences:
        try:
            use(bank, sequence)
        except CheckpointReadError:
            check(bank)
            use(bank, sequence)


def interrupted_banks(
    layer: Layer, act: Callable[[ExpertBank], object], reader: ExpertReader | None = None
) -> Iterator[ExpertBank]:
    """For each line of `act` a bank of four, filled, in which it was interrupted there."""
    for nth in itertools.count(1):
        bank = layer.bank(4, reader)
        use(bank, [0, 1, 2, 3])
        sys.settrace(InterruptAt.in_files(nth, "experts/bank.py", "experts/slots.py", "experts/policy.py"))
        try:
            act(bank)
        except KeyboardInterrupt:
            pass
        else:
            return
        finally:
            sys.settrace(None)
        yield bank


@pytest.mark.parametrize("sequence", [[3, 2], [4, 5, 0], [0, 1, 2, 3, 4, 5, 6, 7]], ids=["hits", "misses", "waves"])
def test_an_interrupt_at_any_line_leaves_no_lie_and_no_lost_slot(layer: Layer, sequence: list[int]) -> None:
    interrupted = 0
    for bank in interrupted_banks(layer, lambda bank: use(bank, sequence)):
        interrupted += 1
        check(bank)
        use(bank, [6, 7, 5, 4])
        assert len(bank.resident) == 4, "no slot was lost"
    assert interrupted > 10


@given(
    slots=st.integers(1, EXPERTS), steps=st.lists(st.tuples(st.integers(1, EXPERTS), st.integers(0, 7)), max_size=9)
)
def test_slots_hold_what_they_claim_whatever_the_bank_is_resized_to(
    layer: Layer, slots: int, steps: list[tuple[int, int]]
) -> None:
    bank = layer.bank(slots)
    use(bank, list(range(EXPERTS)))
    for size, expert in steps:
        before = list(bank.resident)
        bank.resize(size)
        check(bank)
        assert bank.slots == size
        assert bank.nbytes == size * bank.expert_bytes == sum(array.nbytes for array in bank.arrays.values())
        assert list(bank.resident) == before[-size:], "those worth least lost their slots, the order is kept"
        use(bank, [expert])
        assert expert in bank.resident
    assert sorted(bank.resident.values()) == sorted(set(bank.resident.values()))


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_an_interrupt_at_any_line_of_a_resize_leaves_no_lie_and_no_lost_slot(layer: Layer, size: int) -> None:
    interrupted = 0
    for bank in interrupted_banks(layer, lambda bank: bank.resize(size)):
        interrupted += 1
        check(bank)
        use(bank, [6, 7, 5, 4])
        assert len(bank.resident) == min(bank.slots, 4), "no slot was lost"
        assert len({array.shape[0] for array in bank.arrays.values()}) == 1, "kernels want one number of slots"
        assert bank.nbytes == bank.slots * bank.expert_bytes
        bank.resize(3)
        use(bank, [1, 2, 3])
    assert interrupted > 20


def test_a_full_bank_has_each_expert_at_its_number(layer: Layer) -> None:
    bank = full_bank(layer)
    check(bank)
    assert bank.resident == {expert: expert for expert in range(EXPERTS)}
    bank.resize(3)
    check(bank)
    use(bank, [7, 0])
    bank.resize(EXPERTS)
    assert bank.resident.items() >= {7: 7, 0: 0}.items()
    bank.fill()
    check(bank)
    assert bank.resident == {expert: expert for expert in range(EXPERTS)}
    assert list(bank.resident)[-2:] == [7, 0], "what was read to fill up is the coldest"


def test_a_failed_fill_leaves_no_lie_behind(layer: Layer) -> None:
    bank = layer.bank(2)
    use(bank, [4, 5])
    bank.resize(EXPERTS)
    layer.fail_reads = 3
    with pytest.raises(CheckpointReadError):
        bank.fill()
    check(bank)
    use(bank, list(range(EXPERTS)))
    assert len(bank.resident) == EXPERTS


def test_ages_say_how_long_each_slot_was_not_used(layer: Layer) -> None:
    bank = layer.bank(4)
    for experts in ([0, 1], *[[1]] * 40, [2]):
        use(bank, experts)
    assert list(bank.resident) == [0, 2, 1], "1 is worth most"
    assert bank.ages == [43, 41, 1, 0], "but 2 was used last"
    bank.resize(2)
    assert bank.ages == [1, 0]


def test_what_an_expert_is_worth_outlives_its_slot(layer: Layer) -> None:
    bank = layer.bank(2)
    for experts in (*[[0]] * 60, [1, 2], [0], [2]):
        use(bank, experts)
    assert set(bank.resident) == {0, 2}, "0 lost its slot to 1 and 2, and 1 gave it back"
    use(bank, [3])
    assert set(bank.resident) == {0, 3}, "though 2 was used later than 0"


def test_a_resize_keeps_what_each_expert_is_worth(layer: Layer) -> None:
    bank = layer.bank(3)
    for experts in ([0], [0], [1], [2]):
        use(bank, experts)
    order = list(bank.resident)
    bank.resize(4)
    assert list(bank.resident) == order
    bank.clear()
    use(bank, [1])
    use(bank, [0])
    assert list(bank.resident) == [1, 0]


class Held:
    """A preadv whose calls in the reader's threads wait until they are let go."""

    def __init__(self) -> None:
        self.let_go, self.begun = threading.Event(), threading.Semaphore(0)

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            self.begun.release()
            assert self.let_go.wait(5)
        return os.preadv(descriptor, buffers, offset)


def test_a_guess_takes_a_slot_only_once_its_first_byte_is_read(layer: Layer) -> None:
    held = Held()
    reader = ExpertReader(layer.files, preadv=held)
    bank = layer.bank(4, reader)
    use(bank, [0, 1, 2, 3])
    held.let_go.set()
    bank.expect([4])  # is begun before the call comes: next time two are tried
    assert all(held.begun.acquire(timeout=5) for _ in range(2))
    use(bank, [4])
    held.let_go.clear()
    before, evictions = bank.resident, bank.counters.evictions
    bank.expect([6, 7])
    assert all(held.begun.acquire(timeout=5) for _ in range(2)), "both pieces of the first are read, in two threads"
    assert not held.begun.acquire(timeout=0.05), "no third thread reads what nobody waits for"
    assert len(bank.resident) == 2
    first, second, *others = before
    threading.Timer(0.05, held.let_go.set).start()
    bank.want([others[0]], top_k=1)
    bank.used()
    kept = {expert: slot for expert, slot in before.items() if expert != first}
    assert bank.resident == kept, f"{second} never lost its slot"
    assert bank.counters.early_bytes == 2 * bank.expert_bytes, "what was read of 4 and of 6, and nothing of 7"
    assert bank.counters.evictions == evictions + 1
    check(bank)
    reader.close()


def test_what_is_guessed_twice_is_useful_once_and_only_to_a_call(layer: Layer) -> None:
    held = Held()
    reader = ExpertReader(layer.files, preadv=held)
    bank = layer.bank(4, reader)
    bank.expect([6])
    assert all(held.begun.acquire(timeout=5) for _ in range(2))
    bank.expect([6])
    assert bank.counters.early_useful_bytes == bank.counters.early_bytes == 0
    threading.Timer(0.05, held.let_go.set).start()
    use(bank, [6])
    assert bank.counters.early_useful_bytes == bank.counters.early_bytes == bank.expert_bytes
    reader.close()


def test_while_the_disk_gets_to_all_that_is_guessed_the_bound_does_not_fall(layer: Layer) -> None:
    bank = layer.bank(6)
    use(bank, list(range(6)))
    for guess in ([6], [7, 0], [0, 1], [6]):  # 1, 1, 2 and 1 reads, each begun before its call
        bank.expect(guess)
        while any(not coming.read.ready for coming in bank._coming.values()):
            time.sleep(0.001)
        use(bank, guess)
    bank.expect([expert for expert in range(EXPERTS) if expert not in bank.resident])
    assert len(bank._coming) == 2, "as many as there are to read: three might be tried"
    bank.await_early()
    bank._reader.close()


@pytest.mark.parametrize("sequence", [[6], [3], [7, 0, 1, 2, 6]], ids=["guessed", "not", "waves"])
def test_an_interrupt_at_any_line_of_a_guess_and_its_call_leaves_no_lie_and_no_lost_slot(
    layer: Layer, sequence: list[int]
) -> None:
    """With reads that take a moment: some are begun, some withdrawn, some under way when the call comes."""

    def slowly(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.0002)
        return os.preadv(descriptor, buffers, offset)

    def act(bank: ExpertBank) -> None:
        bank.expect([4, 6, 7, 5])
        use(bank, sequence)
        bank.expect([5, 7])
        bank.await_early()

    interrupted = 0
    for bank in interrupted_banks(layer, act, ExpertReader(layer.files, preadv=slowly)):
        interrupted += 1
        check(bank)
        time.sleep(0.0005)
        check(bank)
        use(bank, [6, 7, 5, 4])
        bank.await_early()
        assert len(bank.resident) == 4, "no slot was lost"
    assert interrupted > 50


@given(
    slots=st.integers(1, EXPERTS),
    steps=st.lists(st.tuples(st.lists(st.integers(0, 7), max_size=4), st.lists(st.integers(0, 7), max_size=4))),
)
def test_guesses_leave_no_lie_and_lose_no_slot(
    layer: Layer, slots: int, steps: list[tuple[list[int], list[int]]]
) -> None:
    bank = layer.bank(slots)
    before = asdict(bank.counters)
    for guess, sequence in steps:
        bank.expect(guess[:slots])
        check(bank)
        now = asdict(bank.counters)
        assert all(now[name] >= before[name] for name in now), "whoever watches a counter takes a fall for a restart"
        before = now
        if sequence:
            use(bank, sequence)
            assert len(bank.resident) + len(bank._free) == slots
    bank.await_early()
    check(bank)
    assert len(bank.resident) + len(bank._free) == slots
    counters = bank.counters
    assert 0 <= counters.early_useful_bytes <= counters.early_bytes
    assert counters.evictions >= 0
    bank._reader.close()


def test_counters_count(layer: Layer) -> None:
    bank = layer.bank(2)
    use(bank, [0, 1, 0])
    use(bank, [1, 2])
    counters = bank.counters
    assert (counters.hits, counters.misses, counters.evictions) == (1, 3, 1)
    assert counters.bytes_read == 3 * bank.expert_bytes
    assert bank.nbytes == 2 * bank.expert_bytes == sum(array.nbytes for array in bank.arrays.values())


def test_each_expert_is_read_once_a_chunk(layer: Layer) -> None:
    bank = layer.bank(2)
    use(bank, [0, 1, 2, 3, 4, 5, 6, 7] * 4)
    assert bank.counters.bytes_read == EXPERTS * bank.expert_bytes
