"""``millpond serve``: models over HTTP, until a signal comes."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from socket import AF_INET6, AF_UNIX, socket
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio import TASK_STATUS_IGNORED, Event, create_task_group, open_signal_receiver
from anyio.abc import TaskStatus
from millpond.runtime.catalogue import Catalogue
from millpond.runtime.cli_arguments import UsageError, runtime_config
from millpond.runtime.cli_serve_flags import PORT, model_files
from millpond.runtime.cli_terminal import Terminal
from millpond.runtime.config import RuntimeConfig, parse_bytes
from millpond.runtime.errors import ConfigError
from millpond.runtime.pool_slots import PoolSettings

if TYPE_CHECKING:
    from millpond.actors.http.settings import HttpSettings
    from millpond.runtime.pool import ModelPool

DRAIN_S = 30.0
QUEUE_MAX = 256
"""Requests of one model at once: a burst of 200 clients must find room."""
MEMORY_SHARE = "60%"
KV_SHARE = "30%"
KEY_VARIABLE = "MILLPOND_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeJob:
    """What to serve, and where.

    preload  models that are loaded before the first client is let in
    drain_s  what requests get that run when a signal comes
    """

    config: RuntimeConfig
    catalogue: Catalogue
    preload: tuple[str, ...]
    pool: PoolSettings
    http: HttpSettings
    drain_s: float
    as_json: bool


def run(options: Namespace, terminal: Terminal) -> int:
    """Run the command; return its exit code: 0 after a signal and an orderly end.

    Raises UsageError, ConfigError, OutputClosed and every error of ``open_runtime``.
    """
    try:
        from millpond.actors.http.listening import bound_socket, bound_unix_socket
    except ModuleNotFoundError as error:
        raise UsageError(f"serve needs the http extra: no module {error.name}") from None
    job = serve_job(options)
    unix = getattr(options, "unix", None)
    host, port = getattr(options, "host", "127.0.0.1"), getattr(options, "port", PORT)
    opened = bound_unix_socket(unix) if unix else bound_socket(host, port)
    try:
        with opened as listening, _open_files():
            anyio.run(partial(_serve, job, terminal, listening), backend=options.backend)
    except BaseExceptionGroup as errors:
        raise _sole(errors) from None
    return 0


def serve_job(options: Namespace) -> ServeJob:
    """Return what the flags ask for; raises UsageError and ConfigError."""
    from millpond.actors.http.listening import LOOPBACK
    from millpond.actors.http.settings import HttpSettings

    options.model = ""
    config = runtime_config(options)
    limits = {"requests_max": getattr(options, "queue_max", QUEUE_MAX)}
    if hasattr(options, "batch_max"):
        limits["sequences_max"] = options.batch_max
    config = msgspec.structs.replace(
        config, limits=msgspec.structs.replace(config.limits, **limits)
    )
    files = model_files(options)
    folder = getattr(options, "models", None)
    if not files and folder is None:
        raise UsageError("serve: expected --model or --models (see millpond serve --help)")
    is_local = hasattr(options, "unix") or _is_loopback(getattr(options, "host", "127.0.0.1"))
    catalogue = Catalogue(files, folder)
    models_max = getattr(options, "models_max", PoolSettings().models_max)
    houses = max(1, min(models_max, len(catalogue.scan())))
    kv_bytes_max = _kv_share(getattr(options, "kv_max", KV_SHARE), houses)
    config = msgspec.structs.replace(config, kv_bytes_max=kv_bytes_max)
    http = HttpSettings(
        api_key=getattr(options, "api_key", os.environ.get(KEY_VARIABLE, "")),
        hosts=(*LOOPBACK, *getattr(options, "allow_host", ())) if is_local else (),
        origins=tuple(getattr(options, "allow_origin", ())),
        request_s=getattr(options, "request_max", HttpSettings().request_s),
    )
    return ServeJob(
        config=config.checked(),
        catalogue=catalogue,
        preload=(*(name for name, _ in files[:1]), *options.preload),
        pool=PoolSettings(
            models_max=models_max,
            memory_bytes_max=_memory(getattr(options, "memory_max", MEMORY_SHARE)),
            keep_alive_s=getattr(options, "keep_alive", PoolSettings().keep_alive_s),
        ),
        http=http,
        drain_s=max(0.0, getattr(options, "drain", DRAIN_S)),
        as_json=options.json,
    )


async def _serve(job: ServeJob, terminal: Terminal, listening: socket) -> None:
    from millpond.actors.http.listening import Server
    from millpond.actors.http.routes import make_app, make_services

    stopping = Event()
    async with create_task_group() as group:
        await group.start(_watch_signals, stopping)
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(_pool(job))
            if not await _preload(job, pool, terminal, stopping):
                group.cancel_scope.cancel()
                return
            services = make_services(pool, job.http)
            group.start_soon(services.board.tick)
            server = Server(make_app(services), job.http)
            _announce(job, terminal, listening)
            await server.serve(listening, stopping, job.drain_s)
            terminal.say("millpond: draining is done, closing models")
        group.cancel_scope.cancel()


@asynccontextmanager
async def _pool(job: ServeJob) -> AsyncIterator[ModelPool]:
    from millpond.runtime.api import open_shared
    from millpond.runtime.pool import open_pool
    from millpond.runtime.pool_models import PoolModels

    async with open_shared(job.config) as shared:
        models = PoolModels(job.config, shared, job.http.encoders_max)
        async with open_pool(job.catalogue, job.pool, models.open, models.measure) as pool:
            yield pool


async def _preload(job: ServeJob, pool: ModelPool, terminal: Terminal, stopping: Event) -> bool:
    """Load models before clients come; False if a signal came first."""
    async with create_task_group() as group:

        async def give_up() -> None:
            await stopping.wait()
            group.cancel_scope.cancel()

        group.start_soon(give_up)
        with terminal.waiting("loading"):
            for name in dict.fromkeys(job.preload):
                await pool.preload(await pool.resolve(name))
        group.cancel_scope.cancel()
    return not stopping.is_set()


async def _watch_signals(
    stopping: Event, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED
) -> None:
    """The first signal ends the server in order, the second ends the process."""
    with open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        task_status.started()
        async for number in received:
            if stopping.is_set():
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            stopping.set()


def _announce(job: ServeJob, terminal: Terminal, listening: socket) -> None:
    """Say where the server listens and how to use it."""
    where = listening.getsockname()
    if listening.family == AF_UNIX:
        report = {"unix": where, "url": "http://localhost"}
    else:
        name = f"[{where[0]}]" if listening.family == AF_INET6 else where[0]
        report = {"host": where[0], "port": where[1], "url": f"http://{name}:{where[1]}"}
    if job.as_json:
        terminal.write_json(report)
    else:
        terminal.write_text(_usage(report, job))
    if "host" in report and not _is_loopback(str(report["host"])) and not job.http.api_key:
        terminal.say("millpond: anybody who reaches this machine may use it: set --api-key")


def _usage(report: dict[str, object], job: ServeJob) -> str:
    url, option = report["url"], ""
    if "unix" in report:
        option = f"--unix-socket {report['unix']} "
    names = ", ".join(file.name for file in job.catalogue.scan()[:8]) or "none yet"
    key = " (with your key)" if job.http.api_key else ""
    lines = [
        f"listening   {report.get('unix', url)}",
        f"OpenAI      {url}/v1{key}",
        f"Anthropic   {url}",
        f"status      {url}/",
        f"models      {names}",
        f"try         curl {option}{url}/v1/models",
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def _open_files() -> Iterator[None]:
    """Let this process open as many files as the system allows: each connection is one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        with suppress(OSError, ValueError):  # then connections are fewer, and the others wait
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield


def _kv_share(text: str, houses: int) -> str:
    """Return one house's part of a size that all of them have together."""
    try:
        parse_bytes(text, 1)
        number, mark, _ = text.partition("%")
        return f"{float(number) / houses:.6f}%" if mark else str(parse_bytes(text, 1) // houses)
    except (ConfigError, ValueError) as error:
        raise UsageError(f"argument --kv-max: {error}") from None


def _memory(text: str) -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return parse_bytes(text, total)
    except ConfigError as error:
        raise UsageError(f"argument --memory-max: {error}") from None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _sole(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one error of a group, or the group if it has several."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]
    return found
