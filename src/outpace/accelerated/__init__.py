"""A model of transformers behind its own `generate`, run by the engine."""
