"""Start, life and end of a process, its threads and CPUs, and local child processes."""
