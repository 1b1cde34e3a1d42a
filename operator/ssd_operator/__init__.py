"""The Kubernetes operator of SSDDeployments: pure planning, one reconcile, kopf as the watch."""
