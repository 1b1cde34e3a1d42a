"""Programs of other environments: each imports its engine and nothing of this product.

``wire`` runs one of them.
"""
