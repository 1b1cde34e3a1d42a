"""Generated from protos/ssd/v1 by ``make protos``; never edited."""
