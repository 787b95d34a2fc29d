"""Training of the EAGLE3 draft by training-time test."""
