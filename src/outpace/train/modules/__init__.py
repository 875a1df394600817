"""Trainable networks in plain torch, tensor by tensor what the engine serves."""
