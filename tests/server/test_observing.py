"""Metrics, and traces of a server that runs."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import RunningServer, assert_idle, serving, wait_until

from megavm.profiler.trace import Trace
from megavm.server.engine.metrics import SECONDS, Histogram

PROMPT = "Once upon a time"
# What dashboards of vLLM show, behind our prefix.
KNOWN = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "num_preemptions": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
}


def test_metrics_have_the_names_that_dashboards_know(server: RunningServer) -> None:
    server.complete(max_tokens=2)
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {f.name: f for f in text_string_to_metric_families(response.content.decode())}
    for name, kind in KNOWN.items():
        family = families[f"megavm:{name}"]
        assert family.type == kind
        assert all(s.labels["model_name"] == "stories" for s in family.samples)
        assert family.documentation
    assert "process_resident_memory_bytes" in families


def test_metrics_count_what_was_asked_and_given() -> None:
    with serving() as server:
        tokens = server.complete(max_tokens=7, ignore_eos=True)["usage"]["prompt_tokens"]
        server.stream("/v1/completions", prompt=PROMPT, max_tokens=3, n=2, ignore_eos=True)
        server.post("/v1/completions", {"prompt": PROMPT, "temperature": -1})
        connection = server.open("/v1/completions", prompt=PROMPT, max_tokens=1000)
        wait_until(lambda: server.metric("num_requests_running") == 1)
        assert server.metric("kv_cache_usage_perc") > 0
        connection.close()
        assert_idle(server)
        assert server.metric("num_requests_running") == 0
        assert server.metric("generation_tokens_total") >= 7 + 6
        assert server.metric("prompt_tokens_total") >= 3 * tokens
        assert server.metric("request_success_total", finished_reason="length") == 3
        assert server.metric("request_success_total", finished_reason="abort") == 1
        assert server.metric("time_to_first_token_seconds_count") == 3
        assert server.metric("request_generation_tokens_sum") >= 13
        assert server.metric("e2e_request_latency_seconds_count") == 4
        assert server.metric("http_requests_total", route="/v1/completions", status="400") == 1
        assert server.metric("http_requests_total", route="/v1/completions", status="200") == 2
        assert 0 < server.metric("host_share") < 1
        plan, collect, steps, busy = (
            server.metric(f"engine_{name}_total")
            for name in ("plan_seconds", "collect_seconds", "steps", "busy_seconds")
        )
        assert 0 < plan + collect < busy
        assert steps >= 9
        assert 0 < server.metric("engine_launches_total") <= steps
        assert server.metric("engine_late_launches_total") == 0, "only GPUs have such"
        latency = server.metric("inter_token_latency_seconds_count")
        assert latency >= 6 + 2 + 2


def test_a_request_is_observed_once_when_its_last_completion_ends() -> None:
    with serving(max_num_batched_tokens=16) as server:
        prompt = [5 + i for i in range(40)]  # three steps
        fields = {"prompt": prompt, "n": 3, "max_tokens": 6, "temperature": 1, "seed": 3}
        choices = server.complete(**fields, return_token_ids=True)["choices"]
        server.complete(prompt=prompt, max_tokens=1)
        chat = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
        answer = server.post("/v1/chat/completions", chat).json["usage"]
        lengths = [len(choice["token_ids"]) for choice in choices]
        room = 1024 - answer["prompt_tokens"]  # tokens of a chat without max_tokens
        for name, values in {
            "request_params_n": (3, 1, 1),
            "request_params_max_tokens": (6, 1, room),
            "request_max_num_generation_tokens": (max(lengths), 1, answer["completion_tokens"]),
            "request_prompt_tokens": (40, 40, answer["prompt_tokens"]),
        }.items():
            assert server.metric(f"{name}_count") == 3
            assert server.metric(f"{name}_sum") == sum(values)
        assert server.metric("request_generation_tokens_count") == 5
        phases = ("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum")
        inference = server.metric("request_inference_time_seconds_sum")
        assert inference == pytest.approx(sum(map(server.metric, phases)))
        # As in vLLM, a prompt counts in the step that generates its first token.
        iterations = server.metric("iteration_tokens_total_sum")
        names = ("prompt_tokens_total", "generation_tokens_total")
        assert iterations == sum(map(server.metric, names))
        assert server.engine.counters.steps > server.metric("iteration_tokens_total_count")


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((0.001, 0.01, 1.0))
    for value in (0.0005, 0.001, 0.005, 2.0):
        histogram.observe(value)
    histogram.observe(0.5, 3)
    assert histogram.buckets() == [("0.001", 2), ("0.01", 3), ("1.0", 6), ("+Inf", 7)]
    assert abs(histogram.sum - 3.5065) < 1e-9
    assert SECONDS[0] == 0.0001


# Traces.


def load_trace(content: bytes, directory: Path) -> Trace:
    path = directory / "run.megatrace"
    path.write_bytes(content)
    return Trace.load(path)


def test_a_trace_has_the_next_steps_of_a_running_server(
    server: RunningServer, tmp_path: Path
) -> None:
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            server.complete(max_tokens=50, ignore_eos=True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        response = server.post("/v1/profile", {"steps": 20})
    finally:
        ended.set()
        thread.join(60)
    assert response.status == 200
    assert response.headers["content-type"] == "application/octet-stream"
    assert 'filename="stories.megatrace"' in response.headers["content-disposition"]
    trace = load_trace(response.content, tmp_path)
    assert trace.num_steps == 20
    assert trace.model["name"] == "stories"
    assert trace.machine["bandwidth"] >= trace.machine["bandwidth_median"] > 1e8
    assert trace.machine["flops_per_second"] >= trace.machine["flops_per_second_median"] > 1e8
    assert trace.machine["cores"] >= 1
    assert server.engine.runner._recorder is None  # type: ignore[attr-defined]


def test_a_trace_of_too_few_steps_is_what_there_was(server: RunningServer, tmp_path: Path) -> None:
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(server.post("/v1/profile", {"steps": 1000, "timeout": 2}))
    )
    thread.start()
    wait_until(lambda: server.engine.runner._recorder is not None)  # type: ignore[attr-defined]
    server.complete(max_tokens=5, ignore_eos=True)
    thread.join(30)
    assert load_trace(found[0].content, tmp_path).num_steps == 5


def test_a_trace_without_steps_is_an_error_that_says_so(server: RunningServer) -> None:
    response = server.post("/v1/profile", {"steps": 5, "timeout": 0.1})
    assert response.status == 408
    assert "No step ran within 0.1 s" in response.error["message"]


def test_one_trace_at_a_time(server: RunningServer) -> None:
    body = {"steps": 10_000, "timeout": 30}
    connection = server.open("/v1/profile", **body)
    wait_until(lambda: server.engine.runner._recorder is not None)  # type: ignore[attr-defined]
    response = server.post("/v1/profile", {"steps": 1})
    assert response.status == 409
    assert response.error["code"] == "profile_running"
    # Whoever asked goes away: the next may ask.
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_until(lambda: server.engine.runner._recorder is None)  # type: ignore[attr-defined]
    wait_until(lambda: server.post("/v1/profile", {"steps": 1, "timeout": 0.05}).status == 408)


def test_bad_wishes_for_a_trace_are_refused(server: RunningServer) -> None:
    for body in ({"steps": 0}, {"steps": "many"}, {"timeout": 0}, {"timeout": 1e9}):
        response = server.post("/v1/profile", body)
        assert response.status == 400
        assert response.error["param"] == next(iter(body))
