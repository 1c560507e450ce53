"""Ctrl-C and SIGTERM: the first ends the work in order, the second ends the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable

from anyio import TASK_STATUS_IGNORED, CancelScope, create_task_group, open_signal_receiver
from anyio.abc import TaskStatus


def _never(number: int) -> bool:
    return False


async def until_signalled(
    work: Callable[[], Awaitable[None]], takes: Callable[[int], bool] = _never
) -> int:
    """Run ``work``; return 0, or 128 + n if signal n cut it short.

    takes  is asked about each signal first; a signal that it takes does nothing else

    A signal cancels the work, and this waits until it has unwound.  An error of the work is raised
    as it is, not in a group.
    """
    caught: list[int] = []
    scope = CancelScope()
    try:
        async with create_task_group() as group:
            await group.start(_watch, scope, caught, takes)
            with scope:
                await work()
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise _sole(errors) from None
    return 128 + caught[0] if scope.cancelled_caught else 0


async def _watch(
    scope: CancelScope,
    caught: list[int],
    takes: Callable[[int], bool],
    *,
    task_status: TaskStatus[None] = TASK_STATUS_IGNORED,
) -> None:
    with open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        task_status.started()
        async for number in received:
            if takes(number):
                continue
            if caught:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            caught.append(number)
            scope.cancel()


def _sole(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one error of a group, or the group if it has several."""
    if len(errors.exceptions) > 1:
        return errors
    error = errors.exceptions[0]
    return _sole(error) if isinstance(error, BaseExceptionGroup) else error
