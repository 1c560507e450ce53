"""The ``millpond`` command: chooses a command, and turns every end of it into an exit code.

0 done · 1 failed · 2 usage · 128 + n ended by signal n.  A failure is one line on stderr.  What a
command needs is imported when it runs, so that ``--help`` and a bad flag answer at once.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from millpond.runtime.cli_arguments import UsageError, parse_arguments
from millpond.runtime.cli_terminal import OutputClosed, Terminal
from millpond.runtime.errors import ConfigError, MillpondError

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    arguments  without the program's name; None: those of this process

    Raises SystemExit after ``--help`` and ``--version``; a bug of ours leaves as it is.
    """
    terminal = Terminal(sys.stdout, sys.stderr)
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        terminal.show_log(options.log_level)
        return _run(options, terminal)
    except (UsageError, ConfigError) as error:
        terminal.say(f"millpond: {error}")
        return USAGE
    except OutputClosed as error:
        if error.reason:
            terminal.say(f"millpond: stdout: {error.reason}")
        return FAILED
    except MillpondError as error:
        terminal.say(f"millpond: {error}")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(options: Namespace, terminal: Terminal) -> int:
    match options.command:
        case "generate":
            from millpond.runtime.cli_generate import run as generate

            return generate(options, terminal)
        case "serve":
            from millpond.runtime.cli_serve import run as serve

            return serve(options, terminal)
        case "chat":
            from millpond.runtime.cli_chat import run as chat

            return chat(options, terminal)
        case "inspect":
            from millpond.runtime.cli_inspect import run as inspect

            return inspect(options, terminal)
        case "tokenize":
            from millpond.runtime.cli_tokenize import run as tokenize

            return tokenize(options, terminal)
        case "ls":
            from millpond.runtime.cli_cache import run as cache

            return cache(options, terminal)
        case _:
            from millpond.runtime.cli_cache_care import run as care

            return care(options, terminal)
