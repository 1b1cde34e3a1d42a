"""Conditions, status and Events of a resource. Pure."""
