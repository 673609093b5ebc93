"""The check of a submitted spec as a whole, and the processes with limits that it runs in."""
