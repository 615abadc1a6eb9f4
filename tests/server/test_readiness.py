"""What a server compiles when it is ready, so that no step waits for its program."""

from __future__ import annotations

from functools import partial

from serving import serving, wait_until

from megavm.scheduler.llama.graph import Bucket
from megavm.scheduler.run.stand_ins import can_stand_in


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
