"""Log lines, metrics and traces of a process. They only observe."""

__all__ = ["log", "metrics", "scrape", "tracing"]
