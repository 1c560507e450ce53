"""``millpond inspect``: what the header of a model file tells."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from millpond.runtime.cli_arguments import model_of, runtime_config
from millpond.runtime.cli_terminal import Terminal, bytes_text, visible


def run(options: Namespace, terminal: Terminal) -> int:
    """Run the command; return its exit code, 0 also for a file that cannot be served.

    Raises ModelNotFound, ModelUnreadable (not a GGUF at all), ConfigError and OutputClosed.
    """
    from millpond.runtime.inspect import inspect_report
    from millpond.runtime.numerics import numerics_identity

    options.model = model_of(options)
    config = runtime_config(options)
    report = inspect_report(options.model, config, numerics_identity(config), os.environ)
    if options.json:
        terminal.write_json(report)
    else:
        terminal.write_text("\n".join(inspect_lines(report)) + "\n")
    return 0


def inspect_lines(report: dict[str, Any]) -> list[str]:
    """Return a report as lines for people."""
    provenance = report["provenance"]
    rows = [
        ("file", f"{report['path']}, {bytes_text(report['file_bytes'])}"),
        ("format", f"GGUF v{report['gguf_version']}"),
        ("name", report["name"]),
        ("architecture", report["architecture"]),
        ("quantisation", report["quant"] or "not named"),
        ("weights", f"{report['weights']:,}"),
        ("namespace", f"{report['namespace']}, fingerprint {report['fingerprint']}"),
        ("producer", provenance["producer_version"] or "not hf2q"),
        *_model_rows(report),
        *_computing_rows(report),
        ("can be served", f"no: {report['problem']}" if report["problem"] else "yes"),
    ]
    lines = [f"{name:<14}{visible(text)}" for name, text in rows]
    return [*lines, "", *_tensor_lines(report["tensor_types"])]


def _model_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows that only a file with a known shape has."""
    rows = []
    if report["descriptor"] is not None:
        rows.append(("layers", _layers(report["layers"], report["descriptor"]["sliding_window"])))
        rows.append(("context", f"{report['context_tokens']:,} tokens"))
    if report["kv"] is not None:
        rows += [("KV per token", _kv(report["kv"]))]
    if report["memory"] is not None:
        rows.append(("memory", f"{bytes_text(report['memory']['dense_bytes'])} as dense weights"))
    if report["vocabulary"] is not None:
        rows.append(("vocabulary", _vocabulary(report["vocabulary"])))
    return rows


def _computing_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    found = report["numerics"]
    how = f"{found['device_kind']}, {found['compute_dtype']}, MLX {found['mlx_version']}"
    if found["device_kind"] == "cpu":
        how = f"{how}, BLAS {found['blas_name']} {found['blas_version']}".rstrip()
    rows = [("computes on", how)]
    if report["compute_problem"]:
        rows.append(("slow because", report["compute_problem"]))
    return rows


def _layers(layers: list[dict[str, Any]], window: int) -> str:
    full = sum(layer["kind"] == "full" for layer in layers)
    return f"{len(layers)}: {full} full, {len(layers) - full} with a window of {window} tokens"


def _kv(kv: dict[str, Any]) -> str:
    full, sliding = kv["full_bytes_per_token"], kv["sliding_bytes_per_token"]
    return (
        f"{bytes_text(full)} in full layers, {bytes_text(sliding)} in sliding ones, {kv['dtype']}"
    )


def _vocabulary(found: dict[str, Any]) -> str:
    template = "with" if found["has_chat_template"] else "without"
    return f"{found['tokens']:,} tokens ({found['model']}), {template} a chat template"


def _tensor_lines(types: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'tensors':<14}{'count':>6}{'bytes':>12}  as dense weights"]
    for entry in types:
        size = bytes_text(entry["bytes"])
        lines.append(f"{entry['type']:<14}{entry['tensors']:>6}{size:>12}  {entry['dense']}")
    return lines
