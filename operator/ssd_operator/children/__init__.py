"""Manifests of the objects that a resource owns. Pure."""
