"""The process: watches, work queue, API calls, probes, metrics."""
