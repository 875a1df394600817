"""`python -m outpace.server` is the command `outpace serve`."""

from __future__ import annotations

import sys

from outpace.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
