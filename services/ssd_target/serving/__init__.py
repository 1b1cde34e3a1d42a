"""Requests and responses: services, validation, streams, text. It never imports ``drafts``."""
