"""Many clients at once, some of which leave: every answer is that of the request alone.

benchmarks/server_soak.py does the same for longer.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from serving import RunningServer, assert_idle, serving, wait_until

import server_soak


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 24, "max_model_len": 256},
        {"overlap": True, "steps_per_launch": 4, "prefix_caching": False},
    ],
    ids=["preempting", "overlapping"],
)
def test_a_random_load_gets_what_each_request_gets_alone(options: dict[str, Any]) -> None:
    with serving({"max_queue": 256}, **{"max_num_seqs": 16, **options}) as server:
        counts = asyncio.run(server_soak.random_load(server.port, 200, seed=5, kinds=30))
        assert counts.wrong == []
        assert counts.answered + counts.abandoned == 200
        assert counts.answered > 80
        assert counts.abandoned > 10
        assert_idle(server)
        if "num_blocks" in options:
            assert server.metric("num_preemptions_total") > 0
        assert server.metric("kv_cache_usage_perc") == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(dtype: str) -> None:
    options: dict[str, Any] = {"max_num_seqs": 16, "prefix_caching": True, "dtype": dtype}
    with serving(**options) as server, ThreadPoolExecutor(16) as pool:

        def ask(i: int) -> Any:
            prompt = "The little fox " * i + "Once upon a time"
            fields = {"max_tokens": 60, "ignore_eos": True, "logprobs": 2, "seed": i}
            choice = server.complete(prompt=prompt, temperature=1.0, **fields)["choices"][0]
            return choice["text"], choice["logprobs"]

        alone = [ask(i) for i in range(16)]
        assert len({text for text, _ in alone}) == 16
        steps = server.engine.counters.steps
        # Log-probabilities too are equal in every bit, in both orders of sending.
        assert list(pool.map(ask, range(16))) == alone
        assert list(pool.map(ask, reversed(range(16)))) == alone[::-1]
        assert (
            server.engine.counters.steps - steps < 16 * 60
        )  # the requests ask for 2 * 16 * 60 tokens
        assert_idle(server)


def test_more_load_than_there_is_room_for_is_refused_and_not_queued() -> None:
    with serving({"max_queue": 4}, max_num_seqs=4) as server:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, server.service.engine.num_sequences)
                await asyncio.sleep(0.002)

        async def ask(client: openai.AsyncOpenAI) -> int:
            try:
                await client.completions.create(
                    model="stories", prompt="A", max_tokens=40, extra_body={"ignore_eos": True}
                )
            except openai.RateLimitError:
                return 429
            return 200

        async def everybody() -> list[int]:
            watching = asyncio.create_task(watch())
            async with server.async_client() as client:
                found = await asyncio.gather(*(ask(client) for _ in range(60)))
            watching.cancel()
            return found

        statuses = asyncio.run(everybody())
        assert statuses.count(200) >= 8
        assert statuses.count(429) > 0
        assert most <= 8
        assert_idle(server)


def test_a_client_that_tries_again_gets_its_answer_in_the_end() -> None:
    with serving({"max_queue": 0}, max_num_seqs=1) as server, ThreadPoolExecutor(1) as pool:
        connection = server.open("/v1/completions", prompt="A", max_tokens=900, ignore_eos=True)
        wait_until(lambda: server.engine.num_running == 1)
        client = server.client(max_retries=5)
        asked = pool.submit(client.completions.create, model="stories", prompt="A", max_tokens=2)
        refused = {"route": "/v1/completions", "status": "429"}
        wait_until(lambda: server.metric("http_requests_total", **refused) >= 1)
        connection.close()
        assert asked.result(timeout=60).choices[0].text
        assert_idle(server)


def test_a_cancelled_task_of_the_client_frees_its_blocks(server: RunningServer) -> None:
    async def cancel_some() -> None:
        async with server.async_client() as client:

            async def ask(stream: bool) -> None:
                answer: Any = await client.completions.create(
                    model="stories",
                    prompt="Once upon a time",
                    max_tokens=1000,
                    stream=stream,
                    extra_body={"ignore_eos": True},
                )
                async for _ in answer:
                    pass

            tasks = [asyncio.create_task(ask(i % 2 == 0)) for i in range(6)]
            while server.engine.num_running < 6:
                await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cancel_some())
    assert_idle(server)
