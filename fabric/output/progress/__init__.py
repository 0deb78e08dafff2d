"""Progress displays: of an iteration, and of a checkpoint that is saved or loaded."""
