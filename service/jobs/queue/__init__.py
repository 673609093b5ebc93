"""Plans over the queue, apart from the store: in which order jobs are placed, and when each may start."""
