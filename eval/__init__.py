"""Replay (exact offline acceptance), serving on vLLM, and the report of both."""
