"""The state of the cluster as one pass sees it."""
