"""What drafters are trained on: prompts answered by the target, and text, as windows of token ids."""
