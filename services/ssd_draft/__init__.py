"""The draft process: it grows, ahead of time, the tables of all likely outcomes, and pushes them.

Here belong sessions (a draft's copy of a sequence), the tree of branches, the step thread and the
servicer of links. What an outcome table is, and which outcomes deserve a branch, is
``ssd.speculation``; running the model is ``ssd.engine``.
"""
