"""The target's hidden states, from vLLM's prefill to safetensors shards; the reader is shared with training and eval."""
