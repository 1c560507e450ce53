"""``python -m millpond.runtime``: the ``millpond`` command."""

import sys

from millpond.runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
