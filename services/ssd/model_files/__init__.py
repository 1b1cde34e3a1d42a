"""The files of a model: its name, the hub, its folder, and what the engine makes of it."""
