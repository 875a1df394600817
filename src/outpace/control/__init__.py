"""Decides who drafts how much: the cost of a step, the chance of acceptance, and the best use of both."""
