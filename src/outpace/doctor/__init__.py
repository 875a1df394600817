"""What a machine has for running models, and what speculation can bring on it: looked at and measured, not assumed.

`report` holds what is found and needs no torch, so that the command line can import it; `examine` finds it.
"""

from __future__ import annotations

__all__: list[str] = []
