"""Workers that run other engines in their own environments, and what `compare.py` needs to talk to them."""
