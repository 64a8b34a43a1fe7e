"""How the shipped pair was trained: its text, its training in legs, the steps of the recipe."""
