"""`fabric verify`: the numbers of one process, compared with those of a strategy on the user's own program."""
