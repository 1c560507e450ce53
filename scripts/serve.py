"""``millpond serve`` from a checkout: install what it needs, then become it."""

from __future__ import annotations

import os
import sys

from environment import SetupFailed, base_extras, demo_model, prepare, tell

_MODELS = ("--model", "--models", "-h", "--help")


def main(arguments: list[str]) -> int:
    """Run the script; does not return once the server runs."""
    try:
        python = prepare([*base_extras(), "http", "schema"])
        if not any(one.partition("=")[0] in _MODELS for one in arguments):
            arguments = ["--model", str(demo_model(python)), *arguments]
    except SetupFailed as error:
        tell(f"serve: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    # the same process: whoever started this script can signal the server
    os.execv(python, [str(python), "-P", "-m", "millpond.runtime", "serve", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
