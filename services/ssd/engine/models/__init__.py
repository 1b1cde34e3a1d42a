"""Model families: their layers and the names in their checkpoints."""
