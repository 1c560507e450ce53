"""``millpond serve`` as a child process, for soaks, fuzzing and tests of the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STOP_S = 60.0
"""Time that an orderly end may take, drain and closing of models included."""


@dataclass(frozen=True, slots=True)
class ServeProcess:
    """A server that listens on loopback.

    port  of TCP
    """

    child: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def open_files(self) -> int:
        """Return the count of its file descriptors; Linux only."""
        return len(os.listdir(f"/proc/{self.child.pid}/fd"))

    def resident_bytes(self) -> int:
        """Return the bytes of its memory; Linux only."""
        fields = Path(f"/proc/{self.child.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def threads(self) -> int:
        """Return the count of its threads; Linux only."""
        return len(os.listdir(f"/proc/{self.child.pid}/task"))

    def stop(self) -> int:
        """Ask it to end, and return its exit code."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(STOP_S)


@contextmanager
def serve_process(arguments: Sequence[str], log: Path, port: int = 0) -> Iterator[ServeProcess]:
    """Run ``millpond serve`` until the block is left; it is killed if it still runs then.

    log   takes its stderr
    port  0 chooses one

    Raises RuntimeError with the log if it did not start.
    """
    command = [sys.executable, "-P", "-m", "millpond.runtime", "serve", "--json"]
    command += ["--port", str(port), *arguments]
    with log.open("ab") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"serve ended with {child.wait()}: {log.read_text()[-2000:]}")
        yield ServeProcess(child, int(json.loads(line)["port"]))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
