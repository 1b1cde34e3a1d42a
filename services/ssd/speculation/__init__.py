"""Speculation about speculation, as functions of token ids and scores; read it beside the paper.

Here belong outcomes, the choice of branches, outcome tables, shared noise, verification and the
backup. No model, request, thread or connection belongs here: verification needs token ids, and
the engine needs noise, so the two never import each other.

Source: Kumar, Dao, May, "Speculative Speculative Decoding", arXiv 2603.03251.
"""
