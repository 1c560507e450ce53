#!/usr/bin/env python3
"""Fuzz a running server with schemathesis, by the OpenAPI document that it publishes.

    scripts/fuzz_http.py --examples 100 --seed 1
    scripts/fuzz_http.py --examples 1000 --backend trio

Twice: by the document as it is, where hardly a request names a model that there is, and with the
names and sizes narrowed so that most requests reach one.  Every response must have a status, a
content type and a form that the document names, and none may be 500.  Needs the ``fuzz`` extra.
Prints schemathesis' report and one JSON line; exits 0 if it found nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from millpond.runtime.testing.serve_process import serve_process
from millpond.runtime.testing.tiny_model import tiny_gemma3

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,unsupported_method"
)
CONTEXT_TOKENS = 256
# 504 is what a request gets that gave itself too short a deadline.
RULES = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""


def main() -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(prog="fuzz_http", description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=100, help="of each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.gguf").write_bytes(tiny_gemma3(0, {"gemma3.context_length": CONTEXT_TOKENS}))
        (folder / "schemathesis.toml").write_text(RULES)
        flags = ["--models", name, "--spill-root", str(folder / "spill")]
        with serve_process([*flags, "--backend", options.backend], folder / "log") as process:
            with urlopen(f"{process.url}/openapi.json") as response:
                document = json.load(response)
            codes = {}
            for kind, one in (("published", document), ("narrowed", _narrowed(document))):
                file = folder / f"{kind}.json"
                file.write_text(json.dumps(one))
                codes[kind] = _run(file, process.url, options)
            with urlopen(f"{process.url}/health") as response:
                health = json.load(response)["status"]
            ended = process.stop()
        log = (folder / "log").read_text()
    print(json.dumps({"codes": codes, "health": health, "exit": ended, "log": log[:2000]}))
    return int(any(codes.values()) or health != "ok" or ended != 0 or "failed" in log)


def _run(document: Path, url: str, options: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", url]
    command += ["--checks", CHECKS, "--max-examples", str(options.examples)]
    command += ["--seed", str(options.seed), "--phases", "examples,coverage,fuzzing"]
    command += ["--suppress-health-check", "all", "--request-timeout", "30", "--warnings", "off"]
    command += ["--generation-database", "none"]
    return subprocess.run(command, cwd=document.parent, check=False).returncode


def _narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with models that there are and answers that are short."""
    found: dict[str, Any] = json.loads(json.dumps(document))
    for schema in found["components"]["schemas"].values():
        fields = schema.get("properties", {})
        if "model" in fields:
            fields["model"] = {"enum": ["a"]}
            schema["required"] = sorted({*schema.get("required", ()), "model"})
        for name in ("max_tokens", "max_completion_tokens"):
            if name in fields:
                fields[name] = {"type": "integer", "minimum": 1, "maximum": 8}
                schema["required"] = sorted({*schema.get("required", ()), name})
        if "n" in fields:
            fields["n"] = {"type": "integer", "minimum": 1, "maximum": 3}
        if "messages" in fields:
            fields["messages"] = {"type": "array", "minItems": 1, "items": _MESSAGE}
    return found


_TEXT = {"type": "string", "maxLength": 100}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant"]},
        "content": {
            "oneOf": [
                _TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type"],
                        "properties": {"type": {"enum": ["text", "image_url"]}, "text": _TEXT},
                    },
                },
            ]
        },
    },
}


if __name__ == "__main__":
    sys.exit(main())
