"""Requests and responses: gRPC messages to requests, tokens to text and streams."""
