"""`python -m outpace` is the command `outpace`."""

from __future__ import annotations

import sys

from outpace.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
