"""The guard against scripted readings and a clock that the test winds."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from typing import Any

import pytest

from mlxmoe.errors import CheckpointReadError
from mlxmoe.memory.guard import Guard, GuardTimes, MemoryEvent, Reclaim
from mlxmoe.memory.reading import Pressure, Reading

GB = 10**9


class Machine:
    """A fake machine: its pressure, and an expert cache of `bank` bytes that gives and takes steps of 1 GB."""

    def __init__(self, bank: int = 8 * GB, floor: int = 2 * GB, **options: Any) -> None:
        self.now = 100.0
        self.pressure: Pressure = "normal"
        self.available = 30 * GB
        self.read_s = 0.0
        self.reads = 0
        self.bank, self.floor, self.target = bank, floor, bank
        self.lookahead = GB // 2
        self.pool_freed = 0
        self.did: list[str] = []
        self.heard: list[MemoryEvent] = []
        reclaims = [
            Reclaim("lookahead", self.stop_lookahead, self.stop_lookahead),
            Reclaim("the expert cache", lambda: self.shrink(GB), lambda: self.shrink(100 * GB)),
        ]
        options.setdefault("on_event", self.heard.append)
        self.guard = Guard(self.read, self.free_pool, reclaims, self.grow, clock=lambda: self.now, **options)

    def read(self) -> Reading:
        self.reads += 1
        self.now += self.read_s
        return Reading(
            total_bytes=32 * GB,
            available_bytes=self.available,
            swap_used_bytes=0,
            swap_change_bytes=0,
            footprint_bytes=None,
            active_bytes=0,
            pool_bytes=0,
            peak_bytes=0,
            working_set_bytes=None,
            limit_bytes=None,
            stalls=None,
            pressure=self.pressure,
        )

    def free_pool(self) -> None:
        self.pool_freed += 1

    def stop_lookahead(self) -> int:
        given, self.lookahead = self.lookahead, 0
        if given:
            self.did.append("lookahead")
        return given

    def shrink(self, nbytes: int) -> int:
        given = min(nbytes, self.bank - self.floor)
        self.bank -= given
        if given:
            self.did.append(f"shrink {given // GB}")
        return given

    def grow(self, most: int) -> int:
        taken = min(GB, most, self.target - self.bank)
        self.bank += taken
        if taken:
            self.did.append(f"grow {taken // GB}")
        return taken

    def run(self, pressure: Pressure, seconds: float, step_s: float | None = None) -> None:
        """Check ten times a second under `pressure`, decoding meanwhile where `step_s` is given."""
        self.pressure = pressure
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            if step_s is not None:
                self.guard.note_step(step_s)
            self.guard.check()


def actions(machine: Machine) -> list[str]:
    return [event.action for event in machine.heard]


def test_normal_warning_critical_normal_drive_each_action_in_order() -> None:
    machine = Machine()
    machine.run("normal", 5)
    assert machine.did == []
    assert machine.heard == []

    machine.run("warning", 1.6)
    assert machine.did == ["lookahead", "shrink 1", "shrink 1"], "cheapest first, a step at a time"
    assert machine.pool_freed > 10, "the free pool goes back at every check"
    assert not machine.guard.restricts

    machine.run("critical", 0.2)
    assert machine.did[3:] == ["shrink 4"], "all that can be spared, at once"
    assert machine.bank == machine.floor
    assert machine.guard.restricts
    assert not machine.guard.must_finish
    machine.run("critical", 2)
    assert not machine.guard.must_finish
    machine.run("critical", 2)
    assert machine.guard.must_finish

    machine.run("normal", 4)
    assert machine.guard.restricts, "a level that only just fell is not believed yet"
    assert machine.guard.must_finish
    machine.run("normal", 2)
    assert not machine.guard.restricts
    assert not machine.guard.must_finish
    assert machine.did[4:] == []
    machine.run("normal", 60)
    assert machine.did[4:] == ["grow 1"] * 6
    assert machine.bank == machine.target

    assert actions(machine) == [
        "pressure", "shrink", "shrink", "shrink", "pressure", "restrict", "shrink", "finish", "pressure",
        *["grow"] * 6,
    ]  # fmt: skip
    assert machine.guard.events == tuple(machine.heard)
    assert [event.pressure for event in machine.heard[:6]] == ["warning"] * 4 + ["critical"] * 2


def test_what_happened_is_said_in_words(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    with caplog.at_level(logging.WARNING, logger="mlxmoe"):
        machine.run("warning", 1)
    assert "Memory pressure is warning: the expert cache gave back 1.0 GB." in caplog.messages
    assert machine.heard[1].as_dict()["nbytes"] == GB // 2


def test_readings_take_under_half_a_percent_of_the_time() -> None:
    machine = Machine()
    machine.run("normal", 10)
    assert 90 <= machine.reads <= 101
    slow = Machine()
    slow.read_s = 0.01
    start, slow.reads = slow.now, 0
    slow.run("normal", 100)
    assert slow.reads * slow.read_s <= 0.005 * (slow.now - start) + slow.read_s


def test_one_slow_reading_does_not_blind_the_guard() -> None:
    machine = Machine()
    machine.run("normal", 2)
    machine.read_s = 0.2
    machine.run("normal", 0.1)
    machine.read_s = 0.0
    machine.run("critical", 0.3)
    assert machine.bank == machine.floor


def test_many_calls_between_two_readings_cost_no_reading() -> None:
    machine = Machine()
    for _ in range(1000):
        machine.guard.check()
    assert machine.reads == 1


def test_growth_waits_for_room_and_calm() -> None:
    machine = Machine()
    machine.run("critical", 0.2)
    machine.available = 3 * GB  # the reserve is a tenth of 32 GB
    machine.run("normal", 100)
    assert machine.bank == machine.floor
    machine.available = 30 * GB
    machine.run("normal", 9)
    assert machine.bank == machine.floor + GB
    machine.run("warning", 0.1)
    machine.run("normal", 9)
    assert machine.bank <= machine.floor + GB


def test_growth_that_brings_pressure_back_is_tried_less_and_less_often() -> None:
    machine = Machine()
    machine.lookahead = 0
    gaps, last = [], None
    machine.run("critical", 0.1)
    for _ in range(4):
        while "grow 1" not in machine.did:
            machine.run("normal", 0.1)
        if last is not None:
            gaps.append(machine.now - last)
        last = machine.now
        machine.did.clear()
        machine.run("warning", 0.6)
    assert gaps == sorted(gaps)
    assert gaps[0] > 15
    assert gaps[-1] > 60


def test_growth_stops_where_it_makes_nothing_faster() -> None:
    machine = Machine()
    machine.run("critical", 0.2, step_s=0.2)
    machine.run("normal", 16, step_s=0.2)
    assert machine.did[-1] == "grow 1"
    machine.run("normal", 12, step_s=0.15)
    assert machine.did[-2:] == ["grow 1"] * 2, "it was faster: on"
    machine.run("normal", 100, step_s=0.15)
    assert machine.did.count("grow 1") == 3, "once in vain may be chance, twice is not"
    assert actions(machine)[-1] == "settled"
    machine.run("normal", 600, step_s=0.15)
    assert machine.did.count("grow 1") == 5, "some time later it is tried again"
    machine.guard.resized()
    machine.run("normal", 12, step_s=0.15)
    assert machine.did.count("grow 1") == 6, "and after a resize"
    assert machine.bank == machine.target


def test_growth_stops_although_the_steps_times_scatter() -> None:
    machine, scatter = Machine(bank=100 * GB), random.Random(4)
    machine.available = 2**60
    machine.run("critical", 0.2, step_s=0.2)
    machine.pressure = "normal"
    for _ in range(6000):
        machine.now += 0.1
        machine.guard.note_step(0.15 * scatter.uniform(0.95, 1.05))
        machine.guard.check()
    assert actions(machine)[-1] == "settled"
    assert machine.did.count("grow 1") <= 8


def test_a_growth_that_fails_is_tried_less_and_less_often() -> None:
    def fails(most: int) -> int:
        tried.append(machine.now)
        raise CheckpointReadError("broken")

    tried: list[float] = []
    machine = Machine()
    machine.run("critical", 0.2)
    machine.guard._grow = fails
    machine.run("normal", 200)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert 2 <= len(gaps) <= 5
    assert gaps == sorted(gaps)
    assert "cannot grow just now: broken" in machine.heard[-1].text


def test_the_effect_of_a_growth_is_judged_before_the_next() -> None:
    machine = Machine()
    machine.run("critical", 0.2, step_s=0.2)
    machine.run("normal", 10.5, step_s=0.2)
    grown = machine.bank
    assert machine.did[-1] == "grow 1"
    machine.run("normal", 60)
    assert machine.bank == grown, "nothing was decoded since: nothing is known"


def test_a_pressure_that_flickers_does_not_lift_restrictions() -> None:
    machine = Machine()
    machine.run("critical", 1)
    for _ in range(20):
        machine.run("normal", 1)
        machine.run("critical", 0.1)
    assert machine.guard.restricts
    assert machine.bank == machine.floor
    assert not machine.guard.must_finish, "nor is a pressure that comes and goes the end"


def test_a_callback_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fails(event: MemoryEvent) -> None:
        raise ValueError("a bug of the caller's")

    machine = Machine(on_event=fails)
    machine.run("critical", 0.2)
    assert machine.bank == machine.floor
    assert "callback for memory events failed" in caplog.text


def test_two_threads_do_not_check_at_once() -> None:
    machine = Machine()
    inside, leave = threading.Event(), threading.Event()
    plain = machine.read

    def slow_read() -> Reading:
        inside.set()
        leave.wait(5)
        return plain()

    machine.guard._read = slow_read
    other = threading.Thread(target=machine.guard.check)
    other.start()
    inside.wait(5)
    machine.guard.check()  # returns at once
    assert machine.reads == 0
    leave.set()
    other.join()
    assert machine.reads == 1


def test_a_reading_that_raises_leaves_the_guard_working() -> None:
    machine = Machine(times=GuardTimes(check_s=0.01))
    plain, machine.guard._read = machine.guard._read, lambda: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        machine.guard.check()
    machine.guard._read = plain
    machine.run("critical", 0.5)
    assert machine.bank == machine.floor
