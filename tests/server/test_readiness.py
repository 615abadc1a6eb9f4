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


def test_there_will_be_a_program_for_all_steps_of_more_rows() -> None:
    """So that the first prompts of a server do not run in parts of a few rows."""
    with serving(max_num_batched_tokens=1000) as server:
        runner = server.service.llm.runner
        for rows in range(65, 1001, 11):
            own = runner.bucket(rows, runner.max_logit_rows, runner.max_model_len)

            def has_program(own: Bucket = own) -> bool:
                return any(can_stand_in(every, own) for every in set(runner._programs))

            wait_until(has_program)
