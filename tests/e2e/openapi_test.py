#!/usr/bin/env python3
"""The server against its own /openapi.json: schemathesis makes up requests, right and wrong, and
checks status codes, content types and the schemas of the answers.

    openapi_test.py HCACHE [-v] [name]

Needs tests/e2e/requirements.txt; `make test-clients` installs it into build/clients. The same
requests are sent in every run.
"""

import sys
import unittest

import hypothesis
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

import serving

PROGRAM = sys.argv.pop(1)
PATIENCE = 300  # seconds until an answer hangs rather than comes
EXAMPLES = 25   # right ones for each operation, and as many wrong ones
CHECKED = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
           "response_headers_conformance", "response_schema_conformance")
# Answers of 500 and above that the document promises.
REFUSED = dict.fromkeys((
    "rerank", "llamaRerank", "infill", "slotAction", "ollamaGenerate", "ollamaPull", "ollamaPush",
    "ollamaCreate", "ollamaCopy", "ollamaDelete", "ollamaUploadBlob"), 501)
ENDLESS = {"followEvents"}
# Numbers that decide how long an answer takes, and how large they may be here.
TOKENS = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict",
                        "num_predict"), 4)
CHOICES = dict.fromkeys(("n", "n_cmpl"), 2)


def shorten(body: object, known: dict) -> None:
    """Bounds the answer; what is wrong about a request stays wrong."""
    if not isinstance(body, dict):
        return
    if "options" in known:  # Ollama's
        if body.get("options") is None:
            body["options"] = {}
        shorten(body["options"], {"num_predict": {}})
    for name, most in (TOKENS | CHOICES).items():
        value = body.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        endless = (-2, -1, 0) if name == "num_predict" else (-1,)
        unlimited = name in TOKENS and (value is None or number and value in endless)
        if name in known and (unlimited or number and value > most):
            body[name] = most


class OpenApi(serving.OneServer):
    @classmethod
    def start(cls, folder: str) -> serving.Server:
        load_all_checks()
        cls.checks = [CHECKS.get_one(name) for name in CHECKED]
        return serving.Server(PROGRAM, "-m", serving.default_model(), "--state-dir", folder, "-t", "2",
                              "--ctx", "2048")

    def exercise(self, operation, mode: GenerationMode, refused: int | None, known: dict) -> None:
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
                             suppress_health_check=list(hypothesis.HealthCheck))
        def send(case):
            shorten(case.body, known)
            answer = case.call(timeout=PATIENCE)
            promised = answer.status_code == refused
            case.validate_response(answer, checks=self.checks[1:] if promised else self.checks)

        send()

    def test_every_operation_answers_as_documented(self):
        document = self.server.call("GET", "/openapi.json")[1]
        schema = schemathesis.openapi.from_url(self.server.url + "/openapi.json")
        tested = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            described = document["paths"][operation.path][operation.method]
            name = described["operationId"]
            if name in ENDLESS:
                continue
            body = described.get("requestBody", {}).get("content", {}).get("application/json", {})
            body_name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
            known = document["components"]["schemas"].get(body_name, {}).get("properties", {})
            # Without a body there is next to nothing to get wrong.
            modes = list(GenerationMode) if body else [GenerationMode.POSITIVE]
            for mode in modes:
                with self.subTest(operation=name, mode=mode.name):
                    self.exercise(operation, mode, REFUSED.get(name), known)
                tested += 1
        self.assertGreater(tested, 40)


if __name__ == "__main__":
    unittest.main(verbosity=2)
