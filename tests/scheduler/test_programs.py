"""Programs are compiled once, ahead of their use by a thread, without holding up other sizes."""

from __future__ import annotations

import logging
import sys
import threading

import pytest
from slow_compiler import PROGRAM, SECONDS, Slow, ended, wait_until

from megavm.scheduler.llama.graph import Bucket
from megavm.scheduler.run.programs import SWITCH_SECONDS, Programs

pytestmark = pytest.mark.usefixtures("compiler_threads_end")
ONE, TWO, FOUR = (Bucket(rows, rows, 256) for rows in (1, 2, 4))


def test_another_size_is_compiled_while_one_is_compiling() -> None:
    programs, compile = Programs(), Slow(TWO)
    programs.prepare([TWO], compile)
    assert compile.began.wait(SECONDS)
    assert programs.get(ONE, compile) is PROGRAM
    assert set(programs) == {ONE}
    compile.go_on.set()
    assert programs.get(TWO, compile) is PROGRAM
    assert compile.compiled == [TWO, ONE]


def test_what_was_asked_for_last_is_compiled_first() -> None:
    programs, compile = Programs(), Slow(ONE)
    programs.prepare([ONE], compile)
    assert compile.began.wait(SECONDS)
    programs.prepare([TWO], compile)
    programs.prepare([FOUR, TWO, ONE], compile)
    compile.go_on.set()
    wait_until(lambda: len(set(programs)) == 3)
    assert compile.compiled == [ONE, FOUR, TWO]


def test_an_error_in_the_background_is_logged_once_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    programs, compile = Programs(), Slow(ONE)
    compile.fails = {"megavm-programs"}
    with caplog.at_level(logging.ERROR, "megavm"):
        programs.prepare([ONE], compile)
        assert compile.began.wait(SECONDS)
        waiting = threading.Timer(0.05, compile.go_on.set)
        waiting.start()
        assert programs.get(ONE, compile) is PROGRAM
        waiting.join()
        programs.prepare([ONE], compile)
        programs.close()
        wait_until(ended)
    assert compile.compiled == [ONE, ONE]
    assert len(caplog.records) == 1
    assert "Bucket(rows=1" in caplog.text


def test_an_error_of_the_caller_is_raised_and_tried_again() -> None:
    programs, compile = Programs(), Slow()
    compile.fails = {threading.current_thread().name}
    with pytest.raises(ValueError, match="no program for 1 rows"):
        programs.get(ONE, compile)
    compile.fails.clear()
    assert programs.get(ONE, compile) is PROGRAM


def test_closing_does_not_wait_and_drops_what_is_queued() -> None:
    programs, compile = Programs(), Slow(ONE)
    programs.prepare([ONE, TWO], compile)
    assert compile.began.wait(SECONDS)
    programs.close()
    programs.prepare([FOUR], compile)
    assert not ended()
    compile.go_on.set()
    wait_until(ended)
    assert compile.compiled == [ONE]


@pytest.mark.parametrize("threads", [1, 2])
def test_other_threads_get_the_interpreter_soon_while_programs_are_compiled(threads: int) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.003)
    try:
        work = [(Programs(), Slow(ONE)) for _ in range(threads)]
        for programs, compile in work:
            programs.prepare([ONE], compile)
            assert compile.began.wait(SECONDS)
        for _, compile in work:
            assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
            compile.go_on.set()
        wait_until(ended)
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        sys.setswitchinterval(before)


def test_a_program_that_is_ready_is_not_coming() -> None:
    """Who waited for it would wait for what is compiled before its turn comes in the queue."""
    programs, slow = Programs(), Slow(ONE)
    programs.add(TWO, PROGRAM)
    programs.prepare([ONE, TWO, FOUR], slow)
    assert slow.began.wait(SECONDS)
    assert [programs.is_coming(bucket) for bucket in (ONE, TWO, FOUR)] == [True, False, True]
    slow.go_on.set()


def test_nothing_is_coming_when_the_programs_are_closed() -> None:
    """Who waits for it would wait for ever."""
    programs, slow = Programs(), Slow(ONE)
    programs.prepare([ONE, TWO], slow)
    assert slow.began.wait(SECONDS)
    assert programs.is_coming(ONE)
    assert programs.is_coming(TWO)
    assert not programs.is_coming(FOUR)
    programs.close()
    assert not programs.is_coming(ONE)
    assert not programs.is_coming(TWO)
    slow.go_on.set()


def test_what_is_last_is_compiled_behind_what_is_wanted_later() -> None:
    programs, slow = Programs(), Slow(ONE)
    programs.prepare([ONE], slow)
    assert slow.began.wait(SECONDS)
    programs.prepare([FOUR], slow, last=True)
    programs.prepare([TWO], slow)
    slow.go_on.set()
    wait_until(lambda: len(slow.compiled) == 3)
    assert slow.compiled == [ONE, TWO, FOUR]
