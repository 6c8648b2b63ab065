"""Switch modules between passes: what an interrupt left of the last pass is undone, however it was cut short."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import InterruptAt
from mlx_lm.models.switch_layers import SwitchGLU
from tiny import make_tiny

from mlxmoe import load
from mlxmoe.experts.layer import _Streaming
from mlxmoe.experts.lookahead import routing_blocks
from mlxmoe.experts.recording import _Noting
from mlxmoe.experts.switch import Hearing, mixed, settle, switch_modules

TOKENS = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("left", "settled"),
    [
        ([], []),
        ([_Streaming], [_Streaming]),
        ([Hearing], []),
        ([_Streaming, Hearing], [_Streaming]),
        ([_Noting, _Streaming], [_Streaming]),
        ([_Noting, _Streaming, Hearing], [_Streaming]),
    ],
)
def test_a_module_is_again_what_it_was_before_the_pass(left: list[type], settled: list[type]) -> None:
    module: Any = SwitchGLU(64, 64, 4)
    for mixin in left:
        module.__class__ = mixed(mixin, type(module))
    settle(module)
    kind, found = type(module), []
    while kind is not SwitchGLU:
        found.insert(0, kind.__bases__[0])
        kind = kind.stock_class  # type: ignore[attr-defined]
    assert found == settled


def interrupt_in(function: str, nth: int) -> InterruptAt:
    """At the nth line of one function of the expert cache."""
    return InterruptAt(nth, lambda code: code.co_name == function and "/mlxmoe/experts/" in code.co_filename)


@pytest.mark.parametrize("function", ["guess", "noting"])
def test_an_interrupt_at_any_line_that_exchanges_classes_changes_no_logit(tmp_path: Path, function: str) -> None:
    folder = make_tiny(tmp_path / "tiny")
    with load(folder, experts="all") as engine:
        expected = engine.logits(TOKENS)
    interrupted = 0
    with load(folder, experts="50%", lookahead=True) as engine:
        for nth in range(1, 40):
            engine.resize(("all", "50%")[nth % 2] if function == "noting" else "50%")
            sys.settrace(interrupt_in(function, nth))
            try:
                with engine.record():
                    engine.generate(TOKENS, max_tokens=2)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(None)
            engine.resize("50%")
            with engine.record() as recording:
                assert mx.array_equal(engine.logits(TOKENS), expected)
            assert recording.trace.tokens == len(TOKENS)
            assert mx.array_equal(engine.logits(TOKENS), expected)
            kinds = {type(module).__name__ for module in switch_modules(engine.model).values()}
            assert kinds == {"StreamingSwitchGLU"}
    assert interrupted >= 10


def test_a_fill_that_ctrl_c_cuts_short_writes_to_no_slot_afterwards(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    with load(folder, experts="all") as engine:
        expected = engine.logits(TOKENS)

    def slow_in_threads(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.15)
        return os.preadv(descriptor, buffers, offset)

    with load(folder, experts="25%") as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxmoe.experts.reader.ALONE_S", 0.0)
        engine._experts._reader._queue._preadv = slow_in_threads
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()

        def grow() -> None:
            engine.resize("all")
            time.sleep(5)  # until it is interrupted at the latest

        with pytest.raises(KeyboardInterrupt):
            grow()
        timer.join()
        assert engine._experts._reader._queue.running == 0
        for _ in range(3):
            assert mx.array_equal(engine.logits(TOKENS), expected)
        engine.resize("25%")
        assert mx.array_equal(engine.logits(TOKENS), expected)


def test_a_switch_layer_in_a_list_is_guessed_for_by_the_block_that_has_the_list() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = SwitchGLU(64, 64, 4)
            self.switches = [SwitchGLU(64, 64, 4)]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Block()

    model = Model()
    blocks = routing_blocks(model, ["mlp.experts", "mlp.switches.0"])
    assert blocks == {"mlp.experts": model.mlp, "mlp.switches.0": model.mlp}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_of_a_process_with_an_engine_ends() -> None:
    with load(experts="25%", context=256) as engine:
        engine.generate("In the", max_tokens=3)
        child = os.fork()
        if child == 0:  # what sys.exit does at its end, without pytest's
            import weakref

            for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
                if finalizer.atexit:
                    finalizer()
            os._exit(0)
        for _ in range(100):
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("it hung")
