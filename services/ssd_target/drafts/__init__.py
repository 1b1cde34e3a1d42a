"""Drafts of a target: links, sessions, tables, commits, and the status of the pool."""
