"""A trained draft as the checkpoint that vLLM loads, proven complete."""
