"""Who is next, and how many at once: the queue and the pace, without a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.serving.desk.pace import FORGET_S, STEPS, Pace
from mlxmoe.serving.desk.queue import FairQueue

ITEMS = st.lists(st.tuples(st.sampled_from("abc"), st.integers()), max_size=20, unique_by=lambda item: item[1])


def take_next(queue: FairQueue[tuple[str, int]]) -> tuple[str, int]:
    item = queue.first()
    assert item is not None
    assert queue.take(item)
    return item


@given(ITEMS)
def test_everything_comes_out_once_in_the_order_that_was_told(items: list[tuple[str, int]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for item in items:
        queue.put(item[0], item)
    told = list(queue)
    assert [queue.place(item) for item in told] == list(range(len(items)))
    taken = [take_next(queue) for _ in range(len(queue))]
    assert taken == told
    assert sorted(taken) == sorted(items)
    for client in "abc":  # each one's own keep their order
        assert [item for item in taken if item[0] == client] == [item for item in items if item[0] == client]


@given(ITEMS)
def test_nobody_gets_a_second_turn_before_everybody_had_one(items: list[tuple[str, int]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for item in items:
        queue.put(item[0], item)
    clients = {client for client, _ in items}
    assert {take_next(queue)[0] for _ in clients} == clients


@given(ITEMS, st.data())
def test_what_is_removed_does_not_come_and_changes_no_other_order(
    items: list[tuple[str, int]], data: st.DataObject
) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for item in items:
        queue.put(item[0], item)
    gone = [item for item in items if data.draw(st.booleans())]
    assert all(queue.remove(item) for item in gone)
    assert not any(queue.remove(item) for item in gone)
    left = [take_next(queue) for _ in range(len(queue))]
    assert sorted(left) == sorted(set(items) - set(gone))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(step_s: dict[int, float], most: int = 16) -> tuple[Pace, Clock]:
    clock = Clock()
    pace = Pace(most, clock)
    for _ in range(most):
        size = pace.allowed
        for _ in range(STEPS):
            pace.note(size, step_s.get(size, 1.0))
    return pace, clock


def test_a_batch_grows_by_one_as_long_as_that_is_faster() -> None:
    pace = Pace(8)
    assert pace.allowed == 1
    for size in range(1, 5):
        for _ in range(STEPS):
            assert pace.allowed == size
            pace.note(size, 0.1)  # steps of any size take as long: every reply more is so many tokens more
    assert pace.allowed == 5


def test_a_batch_does_not_grow_beyond_where_it_is_no_faster() -> None:
    pace, _ = measured({1: 0.10, 2: 0.12, 3: 0.15, 4: 0.20, 5: 0.25})  # 10, 17, 20, 20 tokens a second
    assert (pace.allowed, pace.best) == (3, 3)


def test_a_machine_that_was_busy_for_a_while_is_not_held_to_it() -> None:
    clock = Clock()
    pace = Pace(16, clock)
    for number in range(STEPS):
        pace.note(1, 0.10)
        pace.note(2, 0.50 if number % 3 else 0.11)  # most steps of two waited for something else
        pace.note(3, 0.12)
    assert pace.allowed == 4


def test_what_was_measured_is_forgotten_and_tried_again() -> None:
    pace, clock = measured({1: 0.1, 2: 0.2})
    assert (pace.allowed, pace.best) == (1, 1)
    clock.now += FORGET_S + 1
    assert (pace.allowed, pace.best) == (1, None)
    for size in (1, 2):  # now larger ones are faster
        for _ in range(STEPS):
            pace.note(size, 0.1)
    assert pace.allowed == 3


def test_a_slow_machine_has_the_time_to_learn_its_size() -> None:
    """Five seconds a step, as where experts come from the disk: fewer steps than are judged by fit FORGET_S."""
    clock = Clock()
    pace = Pace(16, clock)
    for _ in range(4 * STEPS):
        clock.now += 5.0
        pace.note(pace.allowed, 5.0)
    assert pace.allowed == 5
    clock.now += 100.0  # prompts are read meanwhile
    assert pace.allowed == 5


def test_no_more_than_the_most_are_allowed() -> None:
    pace, _ = measured(dict.fromkeys(range(1, 9), 0.1), most=4)
    assert (pace.allowed, pace.best) == (4, None)


def test_who_is_not_ready_is_passed_by_and_keeps_the_turn() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for item in (("a", 0), ("b", 0), ("b", 1), ("a", 1)):
        queue.put(item[0], item)
    ready = queue.first(lambda item: item != ("a", 0))
    assert ready == ("b", 0)
    assert queue.take(ready)
    assert not queue.take(ready)
    assert [take_next(queue) for _ in range(len(queue))] == [("a", 0), ("b", 1), ("a", 1)]
