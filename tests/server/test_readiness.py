"""What a server compiles when it is ready, so that no step waits for its program."""

from __future__ import annotations

from functools import partial

from serving import serving, wait_until

from megavm.scheduler.llama.graph import Bucket
from megavm.scheduler.run.stand_ins import can_stand_in


def test_a_server_that_is_ready_has_a_program_for_every_step() -> None:
    """That of 64 rows runs those of fewer, whatever their context, and larger ones in parts."""
    with serving() as server:
        runner = server.service.llm.runner
        most = runner.bucket(64, 64, runner.max_model_len)
        # No waiting: a step that comes now has none either.
        assert most in set(runner._programs)
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for own in (
                runner.bucket(rows, rows, runner.max_model_len),
                runner.bucket(rows, 1, 1),
                runner.bucket(rows, rows, 100, decode=True),
            ):
                assert can_stand_in(most, own)


def test_there_will_be_a_program_for_all_steps_of_each_usual_number_of_rows() -> None:
    """Whatever their context, and whether they restrict tokens."""
    with serving() as server:
        runner = server.service.llm.runner

        def ready(bucket: Bucket) -> bool:
            return bucket in set(runner._programs)

        for restricted in (False, True):
            for rows in (1, 2, 4, 8, 16, 32, 64):
                sized = partial(runner.bucket, rows, restricted=restricted)
                every = sized(rows, runner.max_model_len)
                wait_until(partial(ready, every))
                for own in (sized(1, 1), sized(rows, 100, decode=True)):
                    assert can_stand_in(every, own)
