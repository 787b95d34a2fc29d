"""What every stage shares: the config, the contracts on disk, the target, the draft model and its objective."""
