"""The progress display of an iteration."""
