"""The Kubernetes operator of SSDDeployments: pure planning, one reconcile, kopf only as the watch."""
