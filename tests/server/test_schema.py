"""Requests drawn from the OpenAPI document, and around it, are never answered with a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from serving import RunningServer, assert_idle

EXAMPLES = 30


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_request_around_the_schema_is_a_fault(server: RunningServer, mode: Any) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    answered: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]
        if mode is schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
            continue  # nothing about these can be wrong

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "/profile" in case.path:
                case.body["timeout"] = 0.01
            response = case.call(timeout=30)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                keys = {"type", "error"} if "/messages" in case.path else {"error"}
                assert set(response.json()) == keys, response.text
            answered.setdefault(case.path, set()).add(response.status_code)

        check()
    good = {path for path, statuses in answered.items() if 200 in statuses}
    if mode is schemathesis.GenerationMode.POSITIVE:
        assert {"/v1/models", "/health", "/tokenize", "/v1/completions"} <= good
        assert "/v1/responses" in good
    for path in ("/v1/completions", "/v1/responses", "/v1/messages"):
        assert 400 in answered[path]
    assert_idle(server)
