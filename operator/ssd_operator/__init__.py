"""The Kubernetes operator: pure planning, one reconcile, kopf as the watch."""
