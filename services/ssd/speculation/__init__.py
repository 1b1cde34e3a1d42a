"""The algorithm of speculative speculative decoding, as functions of token ids and scores.

This package holds outcomes, fan-out, outcome tables, shared noise, verification, the backup and the
controller. It has no models, requests, threads or connections. Verification needs token ids and the
engine needs noise, so this package and the engine do not import each other.

Source: Kumar, Dao, May, "Speculative Speculative Decoding", arXiv 2603.03251.
"""
