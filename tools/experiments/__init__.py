"""Finished experiments, whose figures ``docs`` reports: they can be run again, and are not shipped.

Run them from the root of the repository: ``python -m tools.experiments --help`` lists them.
"""
