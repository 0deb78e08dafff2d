"""Hang reports: a watcher on each rank, what it reports, and the table printed from it."""
