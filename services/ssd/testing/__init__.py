"""Fakes of the Protocols, for tests only."""
