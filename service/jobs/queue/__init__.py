"""Plans over the queue, apart from the store: the order in which jobs are placed, and when each may start."""
