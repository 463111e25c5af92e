"""A fuzzer over the OpenAPI description: whatever it sends, no answer is a 5xx, and every answer is as described."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from .running import Running

schemathesis = pytest.importorskip("schemathesis")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
OPERATIONS = (
    ("/healthz", "GET"),
    ("/v1/model", "GET"),
    ("/v1/embed", "POST"),
    ("/v1/search", "POST"),
    ("/v1/verify", "POST"),
    ("/v1/gallery", "POST"),
    ("/v1/gallery", "GET"),
    ("/v1/gallery/{id}", "DELETE"),
    ("/v1/gallery/{id}/thumbnail", "GET"),
    ("/v1/classes/{number}", "GET"),
    ("/v1/classes/{number}/thumbnail", "GET"),
)


@pytest.fixture(scope="module")
def schema(bundle_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    gallery = tmp_path_factory.mktemp("fuzz") / "gallery"
    with Running(bundle_path, "--gallery", str(gallery), "--delay-ms", "0") as running:
        yield schemathesis.openapi.from_url(f"{running.url}/openapi.json")


def test_all_operations_are_fuzzed(schema: Any) -> None:
    found = {(one.ok().path, one.ok().method.upper()) for one in schema.get_all_operations()}
    assert found - {("/metrics", "GET")} == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_makes_it_fail(schema: Any, path: str, method: str) -> None:
    checks = [getattr(schemathesis.checks, name) for name in CHECKS]

    @settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=schema[path][method].as_strategy())
    def fuzz(case: Any) -> None:
        answer = case.call()
        assert answer.status_code < 500, answer.text
        case.validate_response(answer, checks=checks)

    fuzz()
