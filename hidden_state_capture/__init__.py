"""The target's hidden states, from vLLM's prefill to safetensors shards; training and eval share the reader."""
