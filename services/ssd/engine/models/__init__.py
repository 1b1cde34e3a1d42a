"""Model families: what each is made of and how its checkpoint names it."""
