"""The draft process: computes the tables of likely outcomes in advance and sends them.

This package contains sessions (a draft's copies of sequences), the tree of branches, the step
thread and the links. ``ssd.speculation`` defines outcome tables and selects outcomes;
``ssd.engine`` runs the model.
"""
