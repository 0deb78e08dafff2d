"""Who waits for whom: each rank's watcher, what it tells, and the table that is made of it."""
