"""``ssd bench sampling``: laws of speculative sampling beside each other, on the logits of a pair.

The product samples coupled. The others are baselines: what it would gain and lose with them.
"""
