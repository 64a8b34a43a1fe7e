"""Expected accepted tokens of all actions from one super-tree, by verification rule."""
