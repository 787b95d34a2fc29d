"""Conversations -> samples that are token-exact as served; and batches for training and evaluation."""
