"""Log lines, metrics and traces of a process. They only observe."""
